"""`memwal inspect`: print stored objects in readable form."""

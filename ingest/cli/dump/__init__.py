"""`memwal inspect`: prints stored objects in readable form."""

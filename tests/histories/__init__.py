"""Record histories of operations, and check with Porcupine that they are linearizable; see README.md."""

"""Histories of operations, and Porcupine to judge whether they are linearizable; see README.md."""

"""Models of memwal's protocols in TLA+, checked by TLC. README.md tells what is modelled and how to run it."""

"""Models of memwal's protocols in TLA+, checked by TLC. README.md lists what is modelled and how to run it."""

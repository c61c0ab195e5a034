"""The whole system for an hour with tiny limits and faults: what grows, and what is lost; see README.md."""

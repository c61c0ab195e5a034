"""Run the whole system for an hour with tiny limits and faults; detect growth and lost rows. See README.md."""

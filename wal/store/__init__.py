"""Object stores: the port, and its adapters for local files, S3 and memory. Imports no other room."""

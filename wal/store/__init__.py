"""Object stores: the port, and its adapters for local files and S3. Imports no other room."""

"""Delete what nothing needs: SSTs, plans, files of the base. Imports base and commits."""

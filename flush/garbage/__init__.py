"""What nobody can need any more: SSTs, plans, files of the base. Imports base and commits."""

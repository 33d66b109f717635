"""The load report: memory that the last load allocated, or why it failed."""

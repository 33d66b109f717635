"""Messages between us and a child, and nothing else."""

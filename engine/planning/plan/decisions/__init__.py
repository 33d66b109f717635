"""What is used where a setting is left open, and why."""

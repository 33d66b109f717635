"""Child processes: started, watched, asked and ended."""

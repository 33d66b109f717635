"""Scripts that measure what the project promises; each prints what it found and one JSON line at the end."""

"""The parent's end of child processes: start, supervision, requests, outcome."""

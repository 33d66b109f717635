"""The parent's side of child processes: start, supervision, requests and outcomes."""

"""Markdown of strangers as Qt documents, while it streams: nothing is fetched, nothing is run, nothing freezes."""

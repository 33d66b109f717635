"""Loads next to other models: models to unload first, the wait for their memory, and probes before a load."""

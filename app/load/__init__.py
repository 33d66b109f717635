"""Loads beside other models: which models to unload first, the wait for their memory, and probes before a load."""

"""The API server of the window: its start and stop, its API keys, and the open and library models that it offers."""

"""Loading in the window: what the load buttons do, and the list of loaded models."""

"""Loads in the window: load buttons, load reports and the list of loaded models."""

"""Decisions on the settings that the user left open, with the reason of each."""

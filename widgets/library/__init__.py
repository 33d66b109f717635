"""The model panel: open, drop, recent."""

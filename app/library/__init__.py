"""The library in the window: looked at, remembered and forecast beside the GUI thread."""

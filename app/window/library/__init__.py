"""The library in the window: models of this computer and of the hub, the welcome page."""

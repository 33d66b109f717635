"""The main window, and the presenters, which connect its widgets with models, sessions and settings."""

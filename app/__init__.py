"""Composition root: entry points, main window, actions, settings, session."""

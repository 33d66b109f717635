"""Widgets of the settings bar, and dialogs for settings, automatic layouts, export and import."""

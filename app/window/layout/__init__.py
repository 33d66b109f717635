"""The layout in the window: editor, automatic layouts, settings of the next load."""

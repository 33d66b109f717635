"""The main window, and the presenters between its widgets and the engine-side objects."""

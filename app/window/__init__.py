"""What stands between the widgets of the main window and the objects behind it."""

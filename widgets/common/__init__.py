"""Parts shared by the widget packages: palette, memory bars, text, dialogs."""

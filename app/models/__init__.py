"""The open models of the window, their layouts and conversations, and the user's actions on them."""

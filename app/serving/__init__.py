"""The API server of the window: its keys, the models that it offers and shares with the chats, its start and stop."""

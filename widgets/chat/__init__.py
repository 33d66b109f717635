"""Widgets of the chat with the loaded model."""

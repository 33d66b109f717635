"""The chat in the window: presenters of messages, attachments, settings, prompts and the list of conversations."""

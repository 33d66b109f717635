"""Conversations in the window: the archive, attachments, saved KV states, export and import."""

"""Conversations: message trees, the SQLite database, prompts and answers, saved KV states, export and import."""

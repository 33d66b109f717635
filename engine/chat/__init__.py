"""Conversations: message trees, the database, prompts and answers, saved KV states, export and import."""

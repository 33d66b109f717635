"""Conversations: where they are kept, which ones there are, and how they are shown."""

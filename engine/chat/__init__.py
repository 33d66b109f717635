"""Conversations: messages as a tree, where they are kept, what of them a model is shown."""

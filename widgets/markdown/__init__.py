"""Untrusted Markdown as Qt documents, also while it streams. Long texts are parsed outside of the GUI thread."""

"""Untrusted sound files: decoded by a process of their own."""

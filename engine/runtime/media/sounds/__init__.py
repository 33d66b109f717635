"""Sounds of strangers: decoded by a process of their own, into plain samples."""

"""Builds engine packs (`make.py pack`). Needs only the standard library."""

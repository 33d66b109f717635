"""Untrusted images and formulas: decoded and drawn by processes of their own."""

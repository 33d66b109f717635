"""Comparing what is needed with what is free."""

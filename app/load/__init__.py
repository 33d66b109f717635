"""Loads among several models: what has to go first, what is waited for, and what is probed before."""

"""Automatic layouts: pure functions of a model, a rig, context settings and constraints."""

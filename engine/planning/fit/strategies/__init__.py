"""Layouts that find themselves: pure functions of a model, a rig, context settings and constraints."""

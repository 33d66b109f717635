"""Strategies: pure functions that find a layout automatically for a model, a rig, settings and constraints."""

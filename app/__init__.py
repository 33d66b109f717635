"""Composition root: entry points, wiring, and the controllers between the engine and the widgets."""

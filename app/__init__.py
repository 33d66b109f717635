"""Composition root: entry points, wiring, and what stands between the engine and the widgets."""

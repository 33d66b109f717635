"""Examining a machine: what is there, whether the engine works on it, and whether forecasts hold."""

"""Examination of a machine: what is installed, whether the engine works on it, and whether forecasts hold."""

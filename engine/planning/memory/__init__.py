"""Forecast of the memory in bytes that a layout needs on each device."""

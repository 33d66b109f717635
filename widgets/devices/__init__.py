"""Widgets of the devices: panels with live memory graphs, details, limits, and plans with other graphics cards."""

"""Widgets of the devices: panels with live memory graphs, details, limits, comparison with other graphics cards."""

"""Widgets of the devices: cards with live memory graphs, details, limits, and cards that are not installed."""

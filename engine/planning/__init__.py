"""From a layout to bytes and seconds: settings, layouts, memory, speed, plans, and the search for layouts that fit."""

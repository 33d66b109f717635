"""Planning of a load: settings, layouts, memory, speed, plans, and the search for layouts that fit."""

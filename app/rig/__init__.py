"""The devices of the window: their sources, their free memory, and the limits that the user sets."""

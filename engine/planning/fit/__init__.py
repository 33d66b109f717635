"""The search for a layout that fits: strategies, steps back, proposals, and measurements of earlier loads."""

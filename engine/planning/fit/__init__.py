"""The search for a layout that fits into memory.

Strategies find a layout automatically. After a load that ran out of memory, `step_back` finds the next layout to try,
and `proposals` offers changes to the user. Measurements of earlier loads correct the forecasts.
"""

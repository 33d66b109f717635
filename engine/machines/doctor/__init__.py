"""Examination of a machine: installed software, checks of the engine on each device, and accuracy of forecasts."""

"""The library in the window: scans, forecasts, the hub and downloads, in background threads."""

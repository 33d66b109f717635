"""The model library in the window: scans, forecasts, the Hugging Face hub and downloads, in background threads."""

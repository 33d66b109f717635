"""The Hugging Face hub: search, and forecasts before a model is downloaded."""

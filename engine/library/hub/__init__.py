"""The Hugging Face hub: search, listings of repositories, and forecasts before a model is downloaded."""

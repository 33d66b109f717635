"""The HTTP server in front of loaded models: routes, limits, API keys, streams, and loading models on demand."""

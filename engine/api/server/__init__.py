"""HTTP in front of loaded models: routes, limits, keys, streams, and the models that are loaded on demand."""

"""The model library: finds model files, groups and describes them, and indexes the results."""

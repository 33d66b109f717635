"""The child process: the only place that imports llama_cpp."""

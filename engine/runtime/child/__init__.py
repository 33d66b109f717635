"""The model child, the only package that imports llama_cpp."""

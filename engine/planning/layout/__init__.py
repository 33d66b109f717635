"""The device of each layer, and its translation into parameters of llama.cpp."""

"""The layout, which names the device of each model layer, and its translation into parameters of llama.cpp."""

"""Loading of models: which others to unload first, the wait for their memory, and probes of the edited layout.

A probe is a load without allocating memory, which gives llama.cpp's own numbers.
"""

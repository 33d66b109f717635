"""Loads models, and unloads other models first if their memory is needed; also probes the edited layout.

A probe is a load without allocating memory, which gives llama.cpp's own numbers.
"""

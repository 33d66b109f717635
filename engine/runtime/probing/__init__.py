"""Probes: llama.cpp's own numbers for a plan, from a load without memory, and proposals that are checked with them."""

"""Probes and proposals.

A probe is a load without memory, which gives the sizes of llama.cpp's buffers. A proposal is a change of layout or
settings after which a model should fit; probes check proposals.
"""

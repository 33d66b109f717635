"""Devices, rigs and remote endpoints as values."""

"""Devices, rigs (all devices of a computer or plan) and remote endpoints as values, and readings of their memory."""

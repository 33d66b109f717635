"""Devices in the window: rigs, machines nearby, engine packs, the examination."""

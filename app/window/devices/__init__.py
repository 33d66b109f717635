"""Devices in the window: cards, lab rig, machines nearby, engine packs, checks of the machine."""

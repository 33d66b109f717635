"""Devices in the window: cards, lab rig, machines nearby, lending, engine packs, and the check of this machine."""

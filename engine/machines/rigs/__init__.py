"""Finds and checks the devices of this machine and of others; used by window and command line."""

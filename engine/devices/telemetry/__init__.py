"""Live readings of the memory and the utilisation of devices and the host."""

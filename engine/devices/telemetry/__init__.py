"""Live readings of the memory and the load of devices and the host."""

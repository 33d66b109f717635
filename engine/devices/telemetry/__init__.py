"""Live readings of device and host memory."""

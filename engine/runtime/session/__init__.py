"""One open model: a machine that decides and does nothing, a driver that does, and the snapshot that all read."""

"""This machine and others as devices: rigs, workers, the tunnel, the examination."""

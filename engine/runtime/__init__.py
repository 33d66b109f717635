"""Child processes: the protocol, starting and watching them, probes, sessions, and the child itself."""

"""Child processes: protocol, supervision, probes, sessions, and the model child itself."""

"""Child processes: protocol, supervision, probes, sessions, and the model child, the process that runs llama.cpp."""

"""Model files: the GGUF reader, the architectures that llama.cpp knows, and the demo models."""

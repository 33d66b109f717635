"""Model files: the GGUF reader, the architectures that llama.cpp knows, the demo model."""

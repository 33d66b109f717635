"""Reading GGUF model files without loading them."""

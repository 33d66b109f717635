"""The reader of GGUF model files. It loads no weights."""

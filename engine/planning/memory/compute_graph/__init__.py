"""The engine's compute graph in miniature: tensors, splits over backends, and the buffers they are allocated in."""

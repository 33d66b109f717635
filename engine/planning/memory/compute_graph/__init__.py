"""llama.cpp's compute graph without data: tensors, splits over backends, and the sizes of compute buffers."""

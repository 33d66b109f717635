"""llama.cpp's compute graph without data: its tensors, its splits over backends, and the sizes of compute buffers."""

"""Access to llama.cpp and ggml in the child: C functions, devices, log, memory breakdown, failures."""

"""The Qt-free domain: models, devices, layouts, memory, and the child processes that run llama.cpp."""

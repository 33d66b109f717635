"""Which layer goes to which device, and what llama.cpp is told about it."""

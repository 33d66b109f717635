"""Records of model architectures: their properties that are in llama.cpp's code and not in the model file."""

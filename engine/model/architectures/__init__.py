"""Properties of architectures that llama.cpp has in its code instead of the model file, one record for each."""

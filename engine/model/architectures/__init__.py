"""Properties of architectures that llama.cpp has in its code and not in the model file; one record for each
architecture.
"""

"""This machine and others as devices for llama.cpp: rigs, RPC workers, the encrypted tunnel, checks and benchmarks."""

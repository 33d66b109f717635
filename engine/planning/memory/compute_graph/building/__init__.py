"""Building of a model's graph as in llama-graph.cpp: hyper-parameters, weights, attention, inputs and output."""

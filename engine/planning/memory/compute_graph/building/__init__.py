"""Makes a model's graph as llama-graph.cpp does: numbers, weights, the graph context, attention, inputs and output."""

"""Builds the graph of a model as llama-graph.cpp does: hyper-parameters, weights, attention, inputs and output."""

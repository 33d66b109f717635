"""Loads a model and its context in the child: parameters, side files, probes, warm-up."""

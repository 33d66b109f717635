"""Loading a model and its context: parameters, side files, probes, the warm-up."""

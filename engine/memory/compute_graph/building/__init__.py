"""What makes a model's graph: numbers, weights, the sketch that builders draw in, and what stands around layers."""

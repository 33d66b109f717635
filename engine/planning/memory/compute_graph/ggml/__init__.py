"""ggml's graph, scheduler and allocator without data; they process a graph section by section."""

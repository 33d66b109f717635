"""ggml without data: graph, scheduler and allocator, which work on one section of a graph after another."""

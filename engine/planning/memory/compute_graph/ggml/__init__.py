"""The engine's mechanism without data: graph, scheduler, allocator, and how a graph is walked section by section."""

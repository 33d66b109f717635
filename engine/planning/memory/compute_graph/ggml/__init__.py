"""ggml's graph, scheduler and allocator without data: they give the sizes of compute buffers for a layout.

Counterparts of ggml have its names: `Graph` (`ggml_cgraph`), `Tensor`, `Scheduler` (`ggml_backend_sched`), splits and
their copies, `Gallocr` (`ggml_gallocr`), `DynTallocr`.

ggml processes a whole graph. Here it is cut into sections, so that results can be cached. A section is consecutive
nodes of the graph, mostly those of one layer. Further words of ours are defined in `compute_graph/README.md`.
"""

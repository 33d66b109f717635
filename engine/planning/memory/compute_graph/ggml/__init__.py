"""ggml's graph, scheduler and allocator without data: they give the sizes of compute buffers for a layout.

What mirrors ggml has ggml's name: `Graph` (`ggml_cgraph`), `Tensor`, `Scheduler` (`ggml_backend_sched`), splits and
their copies, `Gallocr` (`ggml_gallocr`), `DynTallocr`. ggml processes a whole graph; here it is cut, so that results
can be cached. The words for that are ours:

Section: a run of consecutive nodes of the graph, mostly those of one layer. All layers of a kind share one section.
Segment: consecutive sections whose layers are on the same device.
Name (`Key`): identifies a tensor in several sections. In ggml it is the tensor's address in a `ggml_hash_set`.
Slot: index of a tensor in one section, as the allocator uses it. In ggml-alloc it is the index of its `hash_node`.
"""

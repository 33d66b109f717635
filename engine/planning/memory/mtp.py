"""`MtpMemory`: the memory of the context that MTP heads need in addition to the model's own context.

MTP heads are the last blocks of a file. With `load_mtp` llama.cpp loads their weights to the devices of these layers.
The heads get their own context, with a KV cache and compute buffers (`LLAMA_CONTEXT_TYPE_MTP`). The heads' weights are
counted with the model's weights (`ModelMemory.estimate`). The heads' context is counted as memory of the draft.
"""

from __future__ import annotations

from engine.base.language import tr
from engine.base.texts import quote
from engine.base.values import replace
from engine.devices.device import CPU_ID, Rig
from engine.model.architectures.record import Architecture
from engine.model.architectures.registry import find_architecture
from engine.model.gguf.model_file import ModelFile
from engine.planning.layout.layout import Layout, Run
from engine.planning.memory.context_memory import ContextMemory
from engine.planning.memory.cuda_pools import PoolBytes
from engine.planning.memory.estimate import DeviceMemory, Grade, MemoryEstimate
from engine.planning.memory.hyper_parameters import HyperParameters, MissingNumberError, count_skipped_blocks
from engine.planning.memory.placement import Placement, place
from engine.planning.memory.tensors import OverrideMatches
from engine.planning.settings.context_settings import ContextSettings

_OWN_TABLES = ("nextn.embed_tokens.weight", "nextn.shared_head_head.weight")
"""Names of an MTP head's own embedding and output matrix.

The memory of heads with such tensors is not computed, because no graph of them was compared with llama.cpp.
"""
_FLOAT_BYTES = 4
_MOST_TABLES = 12
"""Largest number of context settings for which the memory of the MTP heads (KV cache, compute buffers) is cached."""


def count_heads(model: ModelFile) -> int:
    """Return the number of MTP heads in a file."""
    return count_skipped_blocks(model)


def mtp_error(model: ModelFile) -> str:
    """Return why the MTP heads of a model cannot draft, as a sentence; empty if they can."""
    heads = count_heads(model)
    architecture = find_architecture(model.architecture)
    if not heads:
        return tr("{model} has no MTP heads.", model=model.name)
    if architecture is None or architecture.mtp is None:
        return tr("MTP heads of the architecture {name} are not supported yet.", name=quote(model.architecture))
    if heads > 1:
        # graph_mtp of qwen35.cpp asserts that there is one.
        return tr(
            "{model} has {count} MTP heads, but llama.cpp can use only one for drafts.", model=model.name, count=heads
        )
    names = {tensor.name.split(".", 2)[-1] for tensor in model.blocks[-1].tensors}
    if "nextn.eh_proj.weight" not in names:
        return tr("The file of {model} does not contain the weights of its MTP heads.", model=model.name)
    return ""


def heads_of(hyper: HyperParameters, n_heads: int) -> HyperParameters:
    """Return the hyper-parameters of a model that consists of the last `n_heads` blocks, all with full attention."""
    return replace(
        hyper,
        n_trunk_layers=n_heads,
        n_head=hyper.n_head[-n_heads:],
        n_head_kv=hyper.n_head_kv[-n_heads:],
        head_k=hyper.head_k[-n_heads:],
        head_v=hyper.head_v[-n_heads:],
        window=0,
        sliding=(False,) * n_heads,
        recurrent=(False,) * n_heads,
        caching=(True,) * n_heads,
        recurrent_widths=(0, 0),
        indexer_widths=(0,) * n_heads,
        hashed_widths=(),
        ratios=(),
        cache_of=tuple(range(n_heads)),
        pooled_width=0,
    )


def last_layers(placement: Placement, n_heads: int) -> Placement:
    """Return the placement of the last `n_heads` layers (the MTP heads) alone, with layer numbers from 0.

    The list of devices stays that of the whole model, as in llama.cpp's context of the MTP heads.
    """
    before = placement.n_layers - n_heads
    runs = tuple(
        Run(run.device, max(0, run.first - before), run.last - before) for run in placement.runs if run.last >= before
    )
    return replace(
        placement,
        n_layers=n_heads,
        leading=max(0, placement.leading - before),
        runs=runs,
        left_out=min(placement.leading, before),
    )


class MtpMemory:
    """Memory of the context of a model's MTP heads, for all layouts of the model.

    Only one thread may use an object at a time.

    `state`: hyper-parameters of the model, and the description of its architecture.

    Raises:
        MissingNumberError: the memory of these MTP heads cannot be computed. The message says why.
    """

    def __init__(self, model: ModelFile, state: tuple[HyperParameters, Architecture]) -> None:
        # Imported here, as in `ModelMemory`: both need the graph builders.
        from engine.planning.memory.compute_graph.building.graph_tables import GraphTables

        hyper, architecture = state
        self._n_heads = n_heads = count_heads(model)
        blocks = model.blocks[-n_heads:]
        tensors = tuple(tensor for block in blocks for tensor in block.tensors)
        own = next((each.name for each in tensors if each.name.endswith(_OWN_TABLES)), None)
        if own is not None or architecture.mtp is None:
            raise MissingNumberError(f"the arithmetic of {own or 'these MTP heads'} is not known yet")
        self._model = replace(model, blocks=blocks, tensors=(*model.global_tensors, *tensors))
        self._hyper = heads_of(hyper, n_heads)
        self._architecture = replace(architecture, graph=architecture.mtp, recurrence=None)
        self._graphs = GraphTables(self._model, self._hyper, self._architecture, OverrideMatches(model))
        self._tables: dict[ContextSettings, ContextMemory] = {}

    def estimate(self, layout: Layout, context: ContextSettings, rig: Rig) -> MemoryEstimate:
        """Return the memory of the MTP heads' context on every device of `rig`: KV cache and buffers."""
        placement = last_layers(place(layout, rig, context), self._n_heads)
        tables = self._for_context(context)
        kv, _ = tables.state_bytes(placement)
        assert tables.compute is not None
        compute = tables.compute.device_sizes(placement)
        flash = tables.compute.uses_flash_attention(placement)
        n_outputs = tables.n_outputs(0)
        pools = tables.pools(self._model).of(placement, None, flash=flash, n_outputs=n_outputs)
        rows_bytes = tables.output_bytes(n_outputs) + hidden_bytes(self._hyper, n_outputs)
        devices = {}
        for device_id in rig.ids:
            buffer, pool = compute.get(device_id), pools.get(device_id, PoolBytes())
            devices[device_id] = DeviceMemory(
                kv_cache_bytes=kv.get(device_id, 0),
                compute_bytes=0 if buffer is None else buffer.size_bytes,
                pipeline_bytes=0 if buffer is None else buffer.pipeline_bytes,
                output_bytes=rows_bytes if device_id == CPU_ID else 0,
                answering_bytes=pool.total_bytes,
                late_bytes=pool.late_bytes,
            )
        return MemoryEstimate(devices, Grade.ESTIMATED)

    def _for_context(self, context: ContextSettings) -> ContextMemory:
        found = self._tables.get(context)
        if found is None:
            if len(self._tables) >= _MOST_TABLES:
                self._tables.clear()
            found = ContextMemory(self._hyper, self._architecture, self._graphs, context)
            self._tables[context] = found
        return found


def hidden_bytes(hyper: HyperParameters, rows: int) -> int:
    """Return the bytes that `rows` hidden states take in the output buffer."""
    return hyper.n_embd * rows * _FLOAT_BYTES

"""Sizes of KV cache, recurrent state, output buffer and compute buffers, for one model with one set of settings."""

from __future__ import annotations

from itertools import accumulate
from typing import TYPE_CHECKING

from engine.devices.device import CPU_ID
from engine.model.architectures.record import Architecture
from engine.model.gguf.model_file import ModelFile
from engine.planning.memory.backends import HOST_RULE, SizeRule
from engine.planning.memory.cuda_pools import CudaPools
from engine.planning.memory.hyper_parameters import HyperParameters
from engine.planning.memory.kv_cache import LayerState, context_shape, layer_states
from engine.planning.memory.placement import Placement
from engine.planning.memory.tensor_split import MemberTables
from engine.planning.settings.context_settings import ContextSettings

if TYPE_CHECKING:
    from engine.planning.memory.compute_graph.building.graph_tables import GraphTables
    from engine.planning.memory.compute_graph.forecast import ComputeForecast

_LOGIT_BYTES = 4


class ContextMemory:
    """Memory of KV cache, recurrent state, output buffer and compute buffers, for one model and its context settings.

    `hyper`: hyper-parameters of the model.
    `shape`: sizes that llama.cpp computes from the settings.
    `states`: KV cache and recurrent state of each layer.
    `compute`: forecast of compute buffers; None if they cannot be computed.
    """

    def __init__(
        self,
        hyper: HyperParameters,
        architecture: Architecture,
        graphs: GraphTables | None,
        context: ContextSettings,
    ) -> None:
        self._context = context
        self.hyper = hyper
        self.states = layer_states(hyper, architecture, context)
        self._sums: dict[SizeRule, tuple[tuple[int, ...], tuple[int, ...]]] = {}
        kv, recurrent = zip(*(_layer_bytes(state, HOST_RULE) for state in self.states), strict=True)
        self.layers_kv_bytes: tuple[int, ...] = tuple(a + b for a, b in zip(kv, recurrent, strict=True))
        """Bytes of KV cache and recurrent state of each layer, with the padding of host memory; for display."""
        self.shape = shape = context_shape(context, hyper.n_ctx_train, causal=hyper.causal)
        # Logits are F32, one row for each sequence. T5 keeps the encoder's output beside them.
        self._output_width = hyper.n_vocab + (hyper.n_embd if architecture.keeps_encoded else 0)
        n_floats = self._output_width * shape.n_sequences
        if hyper.pooled_width:
            # A text is pooled in one micro batch, and fits into the cells of its sequence and the trained context.
            longest = min(shape.n_ubatch, shape.n_cells, hyper.n_ctx_train)
            n_tokens = min(shape.n_ubatch, shape.n_sequences * longest)
            n_floats = max(n_floats, n_tokens * (hyper.n_vocab + hyper.pooled_width))
        self.output_buffer_bytes = n_floats * _LOGIT_BYTES
        """Bytes of the output buffer in host memory (`llama_context::output_reserve`).

        The buffer has one row of logits for each sequence. For an embedding model it has a vector and logits of each
        token of a batch, because the load computes such a batch once (`warm_up.py`).
        """
        self._pools: CudaPools | None = None
        self.compute: ComputeForecast | None = None
        if graphs is not None:
            from engine.planning.memory.compute_graph.forecast import ComputeForecast

            self.compute = ComputeForecast(graphs, context)

    def n_outputs(self, n_drafted: int) -> int:
        """Return the largest number of rows that a generation batch needs in the output buffer.

        `n_drafted`: number of drafted tokens of each sequence in the batch.
        """
        # One row for the last token of each sequence and one for each drafted token, but not more than the batch has.
        return max(self.shape.n_sequences, min(self.shape.n_batch, self.shape.n_sequences * (n_drafted + 1)))

    def output_bytes(self, n_outputs: int) -> int:
        """Return the bytes of the output buffer for batches with up to `n_outputs` rows.

        The buffer grows at the first batch with more rows than sequences (`llama_context::output_reserve`).
        """
        return max(self.output_buffer_bytes, self._output_width * n_outputs * _LOGIT_BYTES)

    @property
    def flash_attention(self) -> str:
        """Flash attention in the settings: "auto", "on" or "off"."""
        return self._context.flash_attn

    def pools(self, model: ModelFile) -> CudaPools:
        """Return the `CudaPools` of this context, which are made on first use."""
        if self._pools is None:
            self._pools = CudaPools(model, self.hyper, self.shape, self._context)
        return self._pools

    def state_bytes(
        self, placement: Placement, members: MemberTables | None = None
    ) -> tuple[dict[str, int], dict[str, int]]:
        """Return (bytes of the KV cache, bytes of recurrent state), each by device id.

        The state of a layer is on the layer's device. If the setting `offload_kqv` is off, all state is in host memory.

        `members`: slices of state in split mode tensor; None in other modes.
        """
        kv: dict[str, int] = {}
        recurrent: dict[str, int] = {}
        n_layers = len(self.states)
        if not self._context.offload_kqv:
            ranges = [(CPU_ID, HOST_RULE, 0, n_layers)]
        else:
            ranges = [(CPU_ID, HOST_RULE, 0, placement.leading)]
            for run in placement.runs:
                traits = placement.traits.get(run.device)
                if traits is not None:
                    ranges.append((run.device, traits.size_rule, run.first, run.last + 1))
        for device_id, rule, first, end in ranges:
            # Sums over the layers before each one, so the bytes of a range are one difference.
            for found, sums in zip((kv, recurrent), self._running(rule), strict=True):
                found[device_id] = found.get(device_id, 0) + sums[end] - sums[first]
        if members is not None and self._context.offload_kqv:
            of_members = members.state_bytes(self.states, placement.leading)
            for found, sizes in zip((kv, recurrent), of_members, strict=True):
                found.update(zip(placement.entries, sizes, strict=True))
        return kv, recurrent

    def _running(self, rule: SizeRule) -> tuple[tuple[int, ...], tuple[int, ...]]:
        sums = self._sums.get(rule)
        if sums is None:
            kv, recurrent = zip(*(_layer_bytes(state, rule) for state in self.states), strict=True)
            sums = (tuple(accumulate(kv, initial=0)), tuple(accumulate(recurrent, initial=0)))
            self._sums[rule] = sums
        return sums


def _layer_bytes(state: LayerState, rule: SizeRule) -> tuple[int, int]:
    return (
        sum(tensor.size_bytes(rule) for tensor in state.cache),
        sum(tensor.size_bytes(rule) for tensor in state.recurrent),
    )

"""Bytes of the scheduler's compute buffers on each device, from the activations that are alive together.

The engine's allocator reuses memory as soon as a tensor was read for the last time, so that a buffer is as large as the
worst moment of its device's part of the graph. The moments are few: attention, feed-forward, the output matrix. Which
tensors are alive then was read off the engine's own numbers (tests/zoo) and errs upwards where
its allocator happens to find a better fit.
"""

from __future__ import annotations

from engine.devices.device import CPU_ID
from engine.gguf.model_file import TensorInfo
from engine.layout.context_settings import ContextSettings
from engine.layout.layout import Run
from engine.memory.architectures import Architecture
from engine.memory.backends import HOST_RULE
from engine.memory.feed_forward import FeedForward, tensor_stem
from engine.memory.hyper_parameters import HyperParameters
from engine.memory.kv_cache import context_shape, is_quantised, layer_states
from engine.memory.placement import Placement
from engine.memory.weights import WeightTables

F32_BYTES = 4
PIPELINE_COPIES = 4
"""`GGML_SCHED_MAX_COPIES`: inputs that cross a device boundary are kept this often under pipeline parallelism."""
OFFLOAD_MIN_BATCH = 32
"""Smallest batch whose host weights a device takes over (`GGML_OP_OFFLOAD_MIN_BATCH`)."""
_ALLOCATION_SLACK_BYTES = 4096


class ComputeTables:
    """Worst moments per layer for one model and one set of context settings."""

    def __init__(
        self,
        hyper: HyperParameters,
        feed_forward: tuple[FeedForward, ...],
        architecture: Architecture,
        weights: WeightTables,
        context: ContextSettings,
    ) -> None:
        self._hyper = hyper
        self._feed_forward = feed_forward
        self._context = context
        self._shape = shape = context_shape(context, hyper.n_ctx_train)
        self._token = token = shape.n_ubatch * F32_BYTES
        flash = context.flash_attn != "off"
        hidden = hyper.n_embd * token
        cells = shape.n_cells * shape.n_ubatch
        self._flash = flash
        self._hidden = hidden
        self._mask = cells * (2 if flash else 4)
        self._indices = self._index_bytes(architecture)
        self._spare = hidden if architecture.parallel else 0
        self._new_rows = max(map(sum, zip(hyper.k_widths, hyper.v_widths, strict=True))) * token
        self._arriving = self._arriving_bytes(architecture)
        self._attention = tuple(
            self._attention_bytes(n_head * head_k, n_head, k_width + v_width)
            for n_head, head_k, k_width, v_width in zip(
                hyper.n_head, hyper.head_k, hyper.k_widths, hyper.v_widths, strict=True
            )
        )
        self._gating = tuple(_gating_bytes(ffn, token) for ffn in feed_forward)
        self._mixing = tuple(_mixing_bytes(ffn, token, hidden) for ffn in feed_forward)
        self._scratch = self._scratch_bytes() if flash else 0
        n_outputs = min(shape.n_ubatch, shape.n_batch)
        self._output = (hyper.n_vocab + hyper.n_embd) * n_outputs * F32_BYTES
        layers_kv = [
            sum(tensor.size_bytes(HOST_RULE) for tensor in state.cache)
            for state in layer_states(hyper, architecture, context)
        ]
        self._offloaded = tuple(
            self._offloaded_bytes(index, tensors, layers_kv[index])
            for index, tensors in enumerate(weights.block_tensors)
        )

    def device_bytes(self, placement: Placement) -> dict[str, int]:
        """Return the compute buffer of each device, the CPU's under its id."""
        copies = PIPELINE_COPIES if placement.pipeline else 1
        inputs = self._mask + self._indices
        # Several copies of what crosses into a device are kept to the end; a single one goes after its last reader.
        held = copies * (inputs + self._hidden) if placement.pipeline else 0
        crossing = held or inputs
        found: dict[str, int] = {}
        for run in placement.runs:
            if run.device == CPU_ID:
                continue
            peak = self._layers_bytes(run, placement)
            traits = placement.traits.get(run.device)
            if traits is not None and traits.converts_kv:
                peak = max(peak, max(self._attention[run.first : run.last + 1]) + self._scratch)
            found[run.device] = max(found.get(run.device, 0), crossing + peak)
        offload_to = self._offload_device(placement)
        output = placement.output_device
        if output != CPU_ID:
            has_layers = bool(placement.runs) and placement.runs[-1].device == output
            if has_layers:
                arriving = held + (self._hidden if offload_to == output else 0)
            else:
                arriving = copies * self._hidden if placement.pipeline else self._arriving
            found[output] = max(found.get(output, 0), self._output + arriving)
        if offload_to is not None:
            moved = slice(placement.leading) if not placement.overrides else slice(None)
            copied = inputs + max(self._offloaded[moved])
            found[offload_to] = max(found.get(offload_to, 0), copied)
        for target in {override.device for override in placement.overrides} - {CPU_ID}:
            found[target] = max(found.get(target, 0), inputs + self._overridden_bytes)
        for device_id in found:
            found[device_id] += self._repeated_bytes(placement, device_id)
        found[CPU_ID] = self._host_bytes(placement, copies, held, offloaded=offload_to is not None)
        return {device: size + _ALLOCATION_SLACK_BYTES for device, size in found.items()}

    @property
    def _overridden_bytes(self) -> int:
        """Return what the feed-forward part of any layer takes on the device that overrides send its weights to."""
        return max(*self._gating, *self._mixing) + 4 * self._hidden

    def _layers_bytes(self, run: Run, placement: Placement) -> int:
        """Return the worst moment of a device's layers, beside what crossed into it."""
        layers = slice(run.first, run.last + 1)
        mixing = max(self._mixing[layers])
        # The last layer keeps only the rows that are wanted of two tensors; copies of inputs displace one.
        late = placement.pipeline or run.last == placement.n_layers - 1 or mixing > 0
        peak = max(self._gating[layers]) + self._hidden * (3 if late else 2)
        if mixing:
            peak = max(peak, mixing + self._hidden * (2 if placement.pipeline else 4))
        peak += self._spare
        if not self._context.offload_kqv:
            return peak + self._hidden
        return max(peak, *self._attention[layers])

    def _host_bytes(self, placement: Placement, copies: int, held: int, *, offloaded: bool) -> int:
        """Return the CPU's part: inputs of the graph, the embedded tokens, and its own layers."""
        inputs = copies * (self._mask + self._indices + self._hidden) + self._hidden
        own = [(run.first, run.last) for run in placement.runs if run.device == CPU_ID]
        if placement.leading and not offloaded:
            own.append((0, placement.leading - 1))
        peak = 0
        for first, last in own:
            layers = slice(first, last + 1)
            widest = max(*self._mixing[layers], *self._gating[layers])
            peak = max(peak, widest + 2 * self._hidden + self._spare, *self._attention[layers])
        if not offloaded and any(override.device == CPU_ID for override in placement.overrides):
            peak = max(peak, self._overridden_bytes)
        if not self._context.offload_kqv and not self._flash:
            peak = max(peak, *self._attention)
        elif (offloaded or not self._context.offload_kqv) and self._new_rows > self._hidden:
            # New rows of a cache in host memory pass through here; narrow ones fit where the embedded tokens were.
            peak = max(peak, self._new_rows)
        if placement.output_device == CPU_ID:
            peak = max(inputs + peak, self._output + self._hidden + held)
        else:
            peak += inputs
        return peak + self._repeated_bytes(placement, CPU_ID)

    def _repeated_bytes(self, placement: Placement, device_id: str) -> int:
        """Return what further entries of one device add under pipeline parallelism.

        Each entry is a backend with copies of the hidden state of its own, in the buffer that they share: one set for
        what comes in and one for what goes out. The CPU has a backend even without an entry.
        """
        count = placement.entries.count(device_id) if placement.pipeline else 0
        if device_id != CPU_ID:
            sets = 2 * count - 1 if count > 1 else 0
        elif placement.output_device == CPU_ID and placement.runs and placement.runs[-1].device != CPU_ID:
            sets = 2 * count - 1
        else:
            sets = 2 * count
        return PIPELINE_COPIES * self._hidden * sets

    def _offload_device(self, placement: Placement) -> str | None:
        """Return the device that computes large batches of leading CPU layers, None if they stay on the CPU.

        Weights of a CPU entry belong to a backend that is not the scheduler's last, and then nothing is offloaded.
        """
        allowed = self._context.op_offload and self._shape.n_ubatch >= OFFLOAD_MIN_BATCH
        on_cpu = placement.leading or any(override.device == CPU_ID for override in placement.overrides)
        if not allowed or not on_cpu or CPU_ID in placement.entries:
            return None
        known = [entry for entry in placement.entries if entry in placement.traits]
        return next((entry for entry in known if placement.traits[entry].op_offload), None)

    # ------------------------------------------------------------------ one layer's moments

    def _attention_bytes(self, q_width: int, n_head: int, kv_width: int) -> int:
        """Queries, keys and values beside the residual; without flash attention the scores of every head too."""
        token, hidden = self._token, self._hidden
        q_bytes = q_width * token
        projected = 2 * hidden + q_bytes + kv_width * token
        scores = 0 if self._flash else self._shape.n_cells * n_head * token
        return max(projected, 2 * hidden + 2 * q_bytes + scores)

    def _arriving_bytes(self, architecture: Architecture) -> int:
        """What reaches a device with the output layer alone: it also computes the sums that end the last layer."""
        n_used = self._feed_forward[-1].n_used
        if architecture.parallel:
            return 4 * self._hidden
        return (2 + n_used if n_used else 1) * self._hidden

    def _offloaded_bytes(self, index: int, tensors: tuple[TensorInfo, ...], kv_bytes: int) -> int:
        """What a device needs to compute a CPU layer for a large batch: a copy of one weight or cache at a time."""
        ffn, token, hidden = self._feed_forward[index], self._token, self._hidden
        largest = dict.fromkeys(("down", "ffn", "attention"), 0)
        for tensor in tensors:
            stem = tensor_stem(tensor)
            part = "down" if stem.startswith("ffn_down") else "ffn" if stem.startswith("ffn_") else "attention"
            largest[part] = max(largest[part], tensor.size_bytes)
        attention = self._attention[index] + max(largest["attention"], kv_bytes)
        if ffn.n_used:
            used = ffn.width * ffn.n_used * token
            return max(
                attention,
                largest["ffn"] + 3 * used + 3 * hidden,
                largest["down"] + used + ffn.n_used * hidden + 3 * hidden,
            )
        # The allocator places each copy where an earlier one left a hole, which we do not follow: upper bound.
        weights_bytes = max(largest["ffn"], largest["down"]) + largest["attention"]
        return max(attention, 3 * ffn.width * token + 4 * hidden + weights_bytes)

    def _scratch_bytes(self) -> int:
        """F16 copies of a cache of another type that CUDA's flash attention keeps behind its output."""
        context, shape, hyper = self._context, self._shape, self._hyper
        cells = shape.n_cells * shape.n_streams * 2
        k_bytes = 0 if context.type_k == "f16" else cells * max(hyper.k_widths)
        v_bytes = 0 if context.type_v == "f16" else cells * max(hyper.v_widths)
        return k_bytes + v_bytes

    def _index_bytes(self, architecture: Architecture) -> int:
        """Positions, cache slots of K and V, output rows, and the rotation matrices of a quantised cache."""
        n_tokens, hyper, context = self._shape.n_ubatch, self._hyper, self._context
        v_slots = n_tokens * 8 * (1 if self._flash else max(hyper.v_widths))
        rotations = 0
        if is_quantised(context.type_k):
            rotations += max(hyper.head_k) ** 2 * F32_BYTES
        if is_quantised(context.type_v):
            rotations += max(hyper.head_v) ** 2 * F32_BYTES
        return n_tokens * (8 + 4 * architecture.positions + 8) + v_slots + rotations


def _gating_bytes(ffn: FeedForward, token: int) -> int:
    """Return gate, up and their product (or up and its activation) of one micro-batch."""
    width = ffn.width * max(1, ffn.n_used)
    return max(width * (3 if ffn.gated else 2), 3 * ffn.shared_width) * token


def _mixing_bytes(ffn: FeedForward, token: int, hidden: int) -> int:
    """Return the experts' results before and after weighting, beside what they came from; 0 without experts."""
    return 2 * ffn.n_used * hidden + ffn.width * ffn.n_used * token

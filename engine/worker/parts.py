"""The engine's bytes per buffer type as `Part`s booked on our devices."""

from __future__ import annotations

from engine.protocol.messages import Part
from engine.worker.breakdown import BufferBytes
from engine.worker.devices import CPU_ID, ResolvedDevices
from engine.worker.log import LogFacts

LOG_RESOLUTION_BYTES = 1024 * 1024 // 100
MAPPED_SUFFIX = "_Mapped"


def measured_parts(
    devices: ResolvedDevices, breakdown: dict[int, BufferBytes], facts: LogFacts, output_bytes: int
) -> tuple[Part, ...]:
    """Return the parts of a model and its context; exact where the log's rounding is not needed.

    `output_bytes` is what the output buffer should take; it counts where the engine's log agrees.
    """
    recurrent = facts.logged_bytes("rs")
    attention = facts.logged_bytes("kv")
    parts: dict[str, Part] = {}
    for buffer_type, size in breakdown.items():
        name = devices.engine.buffer_type_name(buffer_type)
        kv_bytes, recurrent_bytes = _split_context(size.context_bytes, name in attention, recurrent.get(name))
        parts[name] = Part(
            device=devices.id_of_buffer_type(buffer_type),
            buffer_type=name,
            weights_bytes=size.model_bytes,
            kv_cache_bytes=kv_bytes,
            recurrent_bytes=recurrent_bytes,
            compute_bytes=size.compute_bytes,
            mapped=name.endswith(MAPPED_SUFFIX),
        )
    return _filled(_with_output(parts, facts, output_bytes))


def logged_parts(
    devices: ResolvedDevices, facts: LogFacts, weights: dict[int, BufferBytes] | None, output_bytes: int
) -> tuple[Part, ...]:
    """Return the parts that the log told of so far, with exact weights where `weights` has them."""
    names = {use: facts.logged_bytes(use) for use in ("model", "kv", "rs", "compute")}
    if weights is not None:
        names["model"] = {devices.engine.buffer_type_name(key): size.model_bytes for key, size in weights.items()}
    parts = {
        name: Part(
            device=devices.id_of_buffer_name(name),
            buffer_type=name,
            weights_bytes=names["model"].get(name, 0),
            kv_cache_bytes=names["kv"].get(name, 0),
            recurrent_bytes=names["rs"].get(name, 0),
            compute_bytes=names["compute"].get(name, 0),
            mapped=name.endswith(MAPPED_SUFFIX),
        )
        for name in dict.fromkeys(name for sizes in names.values() for name in sizes)
    }
    return _filled(_with_output(parts, facts, output_bytes))


def _split_context(total_bytes: int, has_attention: bool, logged_recurrent: int | None) -> tuple[int, int]:
    """Return (KV, recurrent) bytes; only a buffer type that holds both needs the log's rounded number."""
    if logged_recurrent is None:
        return total_bytes, 0
    if not has_attention:
        return 0, total_bytes
    recurrent_bytes = min(logged_recurrent, total_bytes)
    return total_bytes - recurrent_bytes, recurrent_bytes


def _with_output(parts: dict[str, Part], facts: LogFacts, output_bytes: int) -> dict[str, Part]:
    for name, logged_bytes in facts.logged_bytes("output").items():
        exact = abs(logged_bytes - output_bytes) <= LOG_RESOLUTION_BYTES
        part = parts.get(name, Part(device=CPU_ID, buffer_type=name))
        parts[name] = Part(
            device=part.device,
            buffer_type=name,
            weights_bytes=part.weights_bytes,
            kv_cache_bytes=part.kv_cache_bytes,
            recurrent_bytes=part.recurrent_bytes,
            compute_bytes=part.compute_bytes,
            output_bytes=output_bytes if exact else logged_bytes,
            mapped=part.mapped,
        )
    return parts


def _filled(parts: dict[str, Part]) -> tuple[Part, ...]:
    """Leave out buffer types that hold nothing."""
    return tuple(
        part
        for part in parts.values()
        if part.weights_bytes or part.kv_cache_bytes or part.recurrent_bytes or part.compute_bytes or part.output_bytes
    )

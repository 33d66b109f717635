"""Smaller types for the KV cache, and what people call the change."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from engine.gguf.tensor_table import TYPES_BY_NAME
from engine.language import tr
from engine.settings.context_settings import ContextSettings, KvType

_SMALL_TYPES: tuple[KvType, ...] = ("q8_0", "q4_0")


def smaller_caches(now: ContextSettings) -> Iterator[ContextSettings]:
    """Yield settings with K and V, then K alone, in a smaller type; V needs what the rules check."""
    for kind in _SMALL_TYPES:
        key = kind if _bits(kind) < _bits(now.type_k) else now.type_k
        value = kind if _bits(kind) < _bits(now.type_v) else now.type_v
        for type_v in dict.fromkeys((value, now.type_v)):
            if (key, type_v) != (now.type_k, now.type_v):
                yield msgspec.structs.replace(now, type_k=key, type_v=type_v)


def cache_words(before: ContextSettings, after: ContextSettings) -> str:
    """Return "KV cache to q8_0", or which half of it."""
    if before.type_k != after.type_k and before.type_v != after.type_v:
        return tr("KV cache to {type_k}", type_k=after.type_k)
    return (
        tr("K cache to {type_k}", type_k=after.type_k)
        if before.type_k != after.type_k
        else tr("V cache to {type_v}", type_v=after.type_v)
    )


def _bits(kind: KvType) -> float:
    return TYPES_BY_NAME[kind].block_bytes / TYPES_BY_NAME[kind].block_elements

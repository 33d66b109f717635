"""Context options of a load, with our defaults; the worker sets every field explicitly."""

from __future__ import annotations

from typing import Literal

import msgspec

KvType = Literal["f32", "f16", "bf16", "q8_0", "q5_1", "q5_0", "q4_1", "q4_0", "iq4_nl"]
KV_TYPES: tuple[KvType, ...] = ("f32", "f16", "bf16", "q8_0", "q5_1", "q5_0", "q4_1", "q4_0", "iq4_nl")
FlashAttention = Literal["auto", "on", "off"]
FLASH_ATTENTION_MODES: tuple[FlashAttention, ...] = ("auto", "on", "off")
LoadMode = Literal["auto", "mmap", "none", "mlock", "mmap_mlock", "direct_io"]
LOAD_MODES: tuple[LoadMode, ...] = ("auto", "mmap", "none", "mlock", "mmap_mlock", "direct_io")


class ContextSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """`n_ctx` and batches are in tokens; `threads` None lets the worker choose."""

    n_ctx: int = 8192
    n_batch: int = 2048
    n_ubatch: int = 512
    n_seq_max: int = 1
    type_k: KvType = "f16"
    type_v: KvType = "f16"
    flash_attn: FlashAttention = "auto"
    offload_kqv: bool = True
    op_offload: bool = True
    swa_full: bool = False
    kv_unified: bool = False
    load_mode: LoadMode = "auto"
    threads: int | None = None
    threads_batch: int | None = None

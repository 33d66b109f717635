"""Context options of a load, with our defaults; the child sets every field explicitly."""

from __future__ import annotations

from typing import Literal, get_args

import msgspec

KvType = Literal["f32", "f16", "bf16", "q8_0", "q5_1", "q5_0", "q4_1", "q4_0", "iq4_nl"]
KV_TYPES: tuple[KvType, ...] = get_args(KvType)
FlashAttention = Literal["auto", "on", "off"]
FLASH_ATTENTION_MODES: tuple[FlashAttention, ...] = get_args(FlashAttention)
LoadMode = Literal["auto", "mmap", "none", "mlock", "mmap_mlock", "direct_io"]
LOAD_MODES: tuple[LoadMode, ...] = get_args(LoadMode)
OpOffload = bool | Literal["auto"]
Pipeline = Literal["auto", "on", "off"]
PIPELINE_MODES: tuple[Pipeline, ...] = get_args(Pipeline)
AUTO: Literal["auto"] = "auto"
AUTO_CONTEXT = 0
"""As `n_ctx`: as long as is sensible on the rig and fits."""
OFFLOAD_MIN_BATCH = 32
"""The engine's own threshold of op_offload, in tokens of a micro batch (GGML_OP_OFFLOAD_MIN_BATCH)."""


class ContextSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The settings of a context. `engine.planning.settings.table` has the meaning and range of each field.

    `n_ctx` may be `AUTO_CONTEXT`.
    """

    n_ctx: int = 8192
    n_batch: int = 2048
    n_ubatch: int = 512
    n_seq_max: int = 1
    type_k: KvType = "f16"
    type_v: KvType = "f16"
    flash_attn: FlashAttention = "auto"
    offload_kqv: bool = True
    op_offload: OpOffload = True
    op_offload_min_batch: int | None = None
    swa_full: bool = False
    kv_unified: bool = False
    load_mode: LoadMode = "auto"
    threads: int | None = None
    threads_batch: int | None = None
    pipeline: Pipeline = "auto"

    @property
    def offload_batch(self) -> int:
        """The tokens of a micro batch from which on op_offload works."""
        return OFFLOAD_MIN_BATCH if self.op_offload_min_batch is None else self.op_offload_min_batch

    @property
    def n_ctx_each(self) -> int:
        """The context of each of `n_seq_max` requests at a time, in tokens; `AUTO_CONTEXT` where it is left open."""
        return self.n_ctx if self.kv_unified else self.n_ctx // self.n_seq_max

    def with_each(self, n_ctx: int) -> ContextSettings:
        """Return the settings with a context of `n_ctx` tokens for each request."""
        return msgspec.structs.replace(self, n_ctx=n_ctx if self.kv_unified else n_ctx * self.n_seq_max)

    def with_requests(self, n_seq_max: int) -> ContextSettings:
        """Return the settings for that many requests at a time, each with the context that each has now."""
        return msgspec.structs.replace(self, n_seq_max=n_seq_max).with_each(self.n_ctx_each)

"""`ContextSettings`: the settings of a load, with this program's defaults instead of llama.cpp's."""

from __future__ import annotations

from typing import Literal, get_args

from msgspec import Struct

from engine.base.values import replace

KvType = Literal["f32", "f16", "bf16", "q8_0", "q5_1", "q5_0", "q4_1", "q4_0", "iq4_nl"]
KV_TYPES: tuple[KvType, ...] = get_args(KvType)
PLAIN_KV_TYPES: tuple[KvType, ...] = ("f32", "f16", "bf16")
FlashAttention = Literal["auto", "on", "off"]
FLASH_ATTENTION_MODES: tuple[FlashAttention, ...] = get_args(FlashAttention)
LoadMode = Literal["auto", "mmap", "none", "mlock", "mmap_mlock", "direct_io"]
LOAD_MODES: tuple[LoadMode, ...] = get_args(LoadMode)
OpOffload = bool | Literal["auto"]
Pipeline = Literal["auto", "on", "off"]
PIPELINE_MODES: tuple[Pipeline, ...] = get_args(Pipeline)
NumaMode = Literal["off", "distribute", "isolate", "numactl"]
NUMA_MODES: tuple[NumaMode, ...] = get_args(NumaMode)
RopeScaling = Literal["model", "none", "linear", "yarn"]
ROPE_SCALINGS: tuple[RopeScaling, ...] = get_args(RopeScaling)
AUTO: Literal["auto"] = "auto"
AUTO_CONTEXT = 0
"""Value of `n_ctx` for "auto": the program chooses the context length at each load."""
OFFLOAD_MIN_BATCH = 32
"""llama.cpp's default threshold of op offload, in tokens of a micro batch (`GGML_OP_OFFLOAD_MIN_BATCH`)."""


def is_quantised(kv_type: KvType) -> bool:
    """Return whether a KV cache of this type is quantised."""
    return kv_type not in PLAIN_KV_TYPES


class ContextSettings(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The settings of a load, named after llama.cpp's parameters.

    `engine.planning.settings.table` describes each field with its range. Defaults are this program's. The child process
    that loads the model sets every field of llama.cpp's parameters from them.
    """

    # All requests together, as in `llama_context_params`: see `n_ctx_each` for the part of one.
    n_ctx: int = 8192
    n_batch: int = 2048
    n_ubatch: int = 512
    n_seq_max: int = 1
    type_k: KvType = "f16"
    type_v: KvType = "f16"
    flash_attn: FlashAttention = "auto"
    offload_kqv: bool = True
    op_offload: OpOffload = True
    # An environment variable of llama.cpp, not a field: `GGML_OP_OFFLOAD_MIN_BATCH`, set for the child process.
    op_offload_min_batch: int | None = None
    swa_full: bool = False
    kv_unified: bool = False
    load_mode: LoadMode = "auto"
    threads: int | None = None
    threads_batch: int | None = None
    # Not a field of llama.cpp either: the child prevents a pipeline by an override (`model_loader.py`).
    pipeline: Pipeline = "auto"
    # Of `mtmd_context_params`: tokens that a projector with images of any size makes of one; None: its file's own.
    image_max_tokens: int | None = None
    image_min_tokens: int | None = None
    # `ggml_numa_strategy` of the whole process (`llama_numa_init`).
    numa: NumaMode = "off"
    # 0: as the model's file says, as in `llama_context_params`.
    rope_freq_base: float = 0.0
    rope_freq_scale: float = 0.0
    # `llama_rope_scaling_type`; model: as the model's file says.
    rope_scaling: RopeScaling = "model"
    yarn_orig_ctx: int = 0

    @property
    def offload_batch(self) -> int:
        """Return the smallest micro batch that op offload computes on a device, in tokens."""
        return OFFLOAD_MIN_BATCH if self.op_offload_min_batch is None else self.op_offload_min_batch

    @property
    def n_ctx_each(self) -> int:
        """Return the context length of each of the `n_seq_max` parallel requests, in tokens.

        `AUTO_CONTEXT` for "auto".
        """
        # llama.cpp gives each sequence an equal part of n_ctx, or lets all of them share the whole (`llama_context`).
        return self.n_ctx if self.kv_unified else self.n_ctx // self.n_seq_max

    def with_each(self, n_ctx: int) -> ContextSettings:
        """Return the settings with a context of `n_ctx` tokens for each parallel request."""
        return replace(self, n_ctx=n_ctx if self.kv_unified else n_ctx * self.n_seq_max)

    def with_requests(self, n_seq_max: int) -> ContextSettings:
        """Return the settings for `n_seq_max` parallel requests, each with the same context length as now."""
        return replace(self, n_seq_max=n_seq_max).with_each(self.n_ctx_each)

"""The table of load settings: one record for each key of `context` in a layout file.

The table defines how this part of a layout file is parsed and written. Command line options, the settings dialog, the
keys of forecast caches and `docs/settings.md` are also made from it. CONTRIBUTING.md lists the steps to add a setting.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, get_args

import msgspec
from msgspec import Struct

from engine.base.json_file import JsonObject
from engine.base.language import tr
from engine.planning.settings.context_settings import (
    AUTO,
    AUTO_CONTEXT,
    FLASH_ATTENTION_MODES,
    KV_TYPES,
    LOAD_MODES,
    NUMA_MODES,
    OFFLOAD_MIN_BATCH,
    PIPELINE_MODES,
    ROPE_SCALINGS,
    ContextSettings,
    FlashAttention,
    KvType,
    LoadMode,
    RopeScaling,
)
from engine.planning.settings.kinds import Choice, Kind, OpenValue, Real, Switch, Value, WholeNumber

MAX_TOKENS = (1 << 31) - 1
"""Largest `llama_context_params.n_ctx`, because llama.cpp's positions are int32 (`llama_pos`)."""
MAX_SEQUENCES = 256
"""Largest `n_seq_max`: `LLAMA_MAX_SEQ` in llama-cparams.h."""
DRAFTED_TOKENS = 4
"""Default number of tokens that are drafted for one step of speculative decoding."""
MOST_DRAFTED = 64
"""Largest number of tokens that can be drafted for one step."""
MAX_IMAGE_TOKENS = 65_536
"""Upper limit of image tokens, far above the limit of any projector.

libmtmd multiplies the number by the area of a patch in 32-bit integers, which must not overflow.
"""
MAX_THREADS = 512
"""Largest number of threads: `GGML_MAX_N_THREADS` in ggml.h. ggml asserts that there are no more."""
CONTEXT_STEP = 256
"""llama.cpp rounds the context length up to a multiple of this (`GGML_PAD(n_ctx, 256)` in llama-context.cpp)."""

Group = Literal["Context", "Batches", "Computing"]
GROUPS: tuple[Group, ...] = get_args(Group)
Effect = Literal["none", "placement", "context"]
"""How a setting affects memory.

`none`: not at all.
`placement`: it changes which buffers there are (`engine.planning.memory.placement`).
`context`: it changes the sizes of KV caches and compute buffers.
"""

# Files name an open context length by the word "auto" and other open numbers by null: see docs/contract.md.
_WORD = OpenValue(AUTO_CONTEXT, AUTO)
_NULL = OpenValue(None, None)


class Setting(Struct, frozen=True):
    """One row of the table of load settings.

    `key`: field of `ContextSettings` and key in files.
    `flag`: command line option.
    `group`: section of the settings dialog.
    `label`: name in the dialog.
    `help`: phrase on its effect.
    `effect`: how it affects memory.
    `decided_by`: module of `engine.planning.plan.decisions` that chooses the value for "auto"; empty if there is none.
    `rare`: whether a file contains the setting only if its value is not the default.
    `server_options`: llama-server's options for this setting; exports write the first one. Empty if there is none.
    Values that only llama-server accepts are translated in `engine.planning.exchange.server_options` (`_VALUES`).
    `engine_field`: whether `llama_context_params` has a field of the same name with the same values.
    `in_kv_state`: whether the content or shape of the KV cache depends on the setting, so that a saved KV state can
    only be restored with the same value.
    `of_model`: whether a value suits one model only, so that a draft model gets the default instead.
    """

    key: str
    kind: Kind
    flag: str
    group: Group
    label: str
    help: str
    effect: Effect
    decided_by: str = ""
    rare: bool = False
    server_options: tuple[str, ...] = ()
    engine_field: bool = False
    in_kv_state: bool = False
    of_model: bool = False

    @property
    def default(self) -> Value:
        """Return the default value of this setting, from `ContextSettings`."""
        # Defaults are in `ContextSettings` alone, so the table cannot contradict them.
        value: Value = getattr(ContextSettings(), self.key)
        return value

    @property
    def affects_memory(self) -> bool:
        return self.effect != "none"


# The order is that of `ContextSettings`, of the dialog and of files.
SETTINGS: tuple[Setting, ...] = (
    Setting(
        "n_ctx",
        WholeNumber(1, MAX_TOKENS, step=CONTEXT_STEP, open_value=_WORD),
        "--ctx",
        "Context",
        tr("Context length (tokens, all requests)"),
        tr("context length in tokens for all requests together; auto: as much as fits on these devices"),
        "context",
        decided_by="context_length",
        server_options=("-c", "--ctx-size"),
        engine_field=True,
    ),
    Setting(
        "n_batch",
        WholeNumber(1, MAX_TOKENS),
        "--batch",
        "Batches",
        tr("Batch size (tokens)"),
        tr("logical batch: maximum number of prompt tokens per llama.cpp call"),
        "context",
        decided_by="context_length",
        server_options=("-b", "--batch-size"),
        engine_field=True,
    ),
    Setting(
        "n_ubatch",
        WholeNumber(1, MAX_TOKENS),
        # llama.cpp's `n_ubatch`. Compute buffers grow with it.
        "--ubatch",
        "Batches",
        tr("Micro batch size (tokens)"),
        tr("physical batch: tokens computed at a time; a smaller micro batch needs smaller compute buffers"),
        "context",
        decided_by="context_length",
        server_options=("-ub", "--ubatch-size"),
        engine_field=True,
    ),
    Setting(
        "n_seq_max",
        WholeNumber(1, MAX_SEQUENCES, "sequences"),
        "--sequences",
        "Context",
        tr("Parallel requests"),
        tr("number of requests answered at the same time; all requests share the context"),
        "context",
        decided_by="context_length",
        server_options=("-np", "--parallel"),
        engine_field=True,
    ),
    Setting(
        "type_k",
        Choice(KV_TYPES, "T"),
        "--type-k",
        "Context",
        tr("K cache type"),
        tr("data type of the K cache; smaller types need less memory"),
        "context",
        decided_by="attention",
        server_options=("-ctk", "--cache-type-k"),
        in_kv_state=True,
    ),
    Setting(
        "type_v",
        Choice(KV_TYPES, "T"),
        "--type-v",
        "Context",
        tr("V cache type"),
        tr("data type of the V cache; quantised types (q8_0 and smaller) need flash attention"),
        "context",
        decided_by="attention",
        server_options=("-ctv", "--cache-type-v"),
        in_kv_state=True,
    ),
    Setting(
        "flash_attn",
        Choice(FLASH_ATTENTION_MODES),
        "--flash-attn",
        "Context",
        tr("Flash attention"),
        tr("computes attention as one operation, which saves memory and time; auto: if every device supports it"),
        "context",
        decided_by="attention",
        server_options=("-fa", "--flash-attn"),
    ),
    Setting(
        "offload_kqv",
        Switch(),
        "--offload-kqv",
        "Context",
        tr("Offload KV cache"),
        tr("stores the KV cache of each layer on the device of the layer; off: in host memory"),
        "context",
        engine_field=True,
    ),
    Setting(
        "op_offload",
        Switch(with_auto=True),
        "--op-offload",
        "Computing",
        # "op offload" is llama.cpp's own name (`llama_context_params.op_offload`).
        tr("Op offload"),
        tr("for large batches, GPUs compute with weights that are in host memory"),
        "context",
        decided_by="op_offload",
    ),
    Setting(
        "op_offload_min_batch",
        WholeNumber(1, MAX_TOKENS, open_value=_NULL),
        "--op-offload-min-batch",
        "Computing",
        tr("Op offload minimum (tokens)"),
        tr(
            "smallest batch for op offload, in tokens; auto: llama.cpp's default, {offload_min_batch}",
            offload_min_batch=OFFLOAD_MIN_BATCH,
        ),
        "context",
        decided_by="op_offload",
        rare=True,
    ),
    Setting(
        "swa_full",
        Switch(),
        # llama.cpp's `swa_full`: needed to go back further than the window without reading the prompt again.
        "--swa-full",
        "Context",
        tr("Full-size SWA cache"),
        tr("sliding-window layers keep the KV cache of the whole context"),
        "context",
        engine_field=True,
        in_kv_state=True,
    ),
    Setting(
        "kv_unified",
        Switch(),
        # llama.cpp's `kv_unified`: one stream of cells for all sequences.
        "--kv-unified",
        "Context",
        tr("Unified KV cache"),
        tr("all requests share one KV cache; off: each has an equal part"),
        "context",
        engine_field=True,
    ),
    Setting(
        "load_mode",
        Choice(LOAD_MODES),
        "--load-mode",
        "Computing",
        tr("Load mode"),
        tr("how the model file is read: memory-mapped (mmap), locked in memory (mlock), or bypassing the page cache"),
        "placement",
        decided_by="load_mode",
    ),
    Setting(
        "threads",
        WholeNumber(1, MAX_THREADS, "threads", open_value=_NULL),
        "--threads",
        "Computing",
        tr("Threads for answers"),
        tr("CPU threads for answers; auto: the measured best, else one for each performance core"),
        "none",
        decided_by="threads",
        server_options=("-t", "--threads"),
    ),
    Setting(
        "threads_batch",
        WholeNumber(1, MAX_THREADS, "threads", open_value=_NULL),
        "--threads-batch",
        "Computing",
        tr("Threads for prompts"),
        tr("CPU threads for prompts; auto: the measured best, else as many as for answers"),
        "none",
        decided_by="threads",
        server_options=("-tb", "--threads-batch"),
    ),
    Setting(
        "pipeline",
        Choice(PIPELINE_MODES),
        "--pipeline",
        "Batches",
        tr("Pipeline parallelism"),
        tr(
            "devices compute different micro batches of a prompt at the same time, which needs extra copies of "
            "the inputs; auto: on if a pipeline is faster and there is room"
        ),
        "placement",
        decided_by="pipeline",
        rare=True,
    ),
    Setting(
        "image_max_tokens",
        WholeNumber(1, MAX_IMAGE_TOKENS, open_value=_NULL),
        "--image-max-tokens",
        "Context",
        tr("Largest image (tokens)"),
        tr(
            "maximum number of tokens of an image, for projectors that read images of any size; the load reserves "
            "memory for such an image; auto: the projector's own limit"
        ),
        "context",
        rare=True,
        server_options=("--image-max-tokens",),
    ),
    Setting(
        "image_min_tokens",
        WholeNumber(1, MAX_IMAGE_TOKENS, open_value=_NULL),
        "--image-min-tokens",
        "Context",
        tr("Smallest image (tokens)"),
        tr(
            "minimum number of tokens of an image, for projectors that read images of any size; smaller images are "
            "enlarged; auto: the projector's own limit"
        ),
        "context",
        rare=True,
        server_options=("--image-min-tokens",),
    ),
    Setting(
        "numa",
        Choice(NUMA_MODES),
        # ggml places threads only if there are several nodes (`ggml_is_numa`).
        "--numa",
        "Computing",
        tr("Threads on NUMA nodes"),
        tr(
            "placement of the CPU's threads on several NUMA nodes: all nodes (distribute), the node on which the load "
            "starts (isolate), or as set by numactl (numactl)"
        ),
        "none",
        rare=True,
        server_options=("--numa",),
    ),
    Setting(
        "rope_freq_base",
        Real(0.0, 1e9, step=10_000.0, low_word=tr("model's own")),
        "--rope-freq-base",
        "Context",
        tr("RoPE frequency base"),
        tr("base frequency of the rotary position embedding; a higher one suits longer contexts; 0: the model's own"),
        "none",
        rare=True,
        server_options=("--rope-freq-base",),
        engine_field=True,
        in_kv_state=True,
        of_model=True,
    ),
    Setting(
        "rope_freq_scale",
        Real(0.0, 10.0, step=0.25, low_word=tr("model's own")),
        "--rope-freq-scale",
        "Context",
        tr("RoPE frequency scale"),
        tr(
            "factor on the positions of the rotary position embedding; 0.5 stretches the trained context to twice its "
            "length; 0: the model's own"
        ),
        "none",
        rare=True,
        server_options=("--rope-freq-scale",),
        engine_field=True,
        in_kv_state=True,
        of_model=True,
    ),
    Setting(
        "rope_scaling",
        Choice(ROPE_SCALINGS),
        "--rope-scaling",
        "Context",
        tr("RoPE scaling"),
        tr(
            "how positions are scaled for contexts longer than the trained length: yarn, which suits most models; "
            "linear; none, which ignores the RoPE frequency scale; model: the model's own"
        ),
        "none",
        rare=True,
        server_options=("--rope-scaling",),
        in_kv_state=True,
        of_model=True,
    ),
    Setting(
        "yarn_orig_ctx",
        WholeNumber(1, MAX_TOKENS, open_value=OpenValue(0, None)),
        "--yarn-orig-ctx",
        "Context",
        tr("YaRN original context (tokens)"),
        tr("trained context length from which YaRN scales, in tokens; auto: the model's own"),
        "none",
        rare=True,
        server_options=("--yarn-orig-ctx",),
        engine_field=True,
        in_kv_state=True,
        of_model=True,
    ),
)

KEYS: tuple[str, ...] = tuple(setting.key for setting in SETTINGS)


def memory_key(context: ContextSettings) -> tuple[Value, ...]:
    """Return the values of all settings that affect memory, as a part of a cache key."""
    return tuple(getattr(context, setting.key) for setting in SETTINGS if setting.affects_memory)


FROM_FILE: Mapping[str, Value] = {
    "yarn_ext_factor": -1.0,
    "yarn_attn_factor": -1.0,
    "yarn_beta_fast": -1.0,
    "yarn_beta_slow": -1.0,
}
"""Fields of `llama_context_params` whose values come from the model's file, each with the number that means this."""


_ROPE_SCALING_TYPES: Mapping[RopeScaling, int] = {"model": -1, "none": 0, "linear": 1, "yarn": 2}
"""Values of `llama_rope_scaling_type` in llama.h."""
_FLASH_ATTENTION_TYPES: Mapping[FlashAttention, int] = {"auto": -1, "off": 0, "on": 1}
"""Values of `llama_flash_attn_type` in llama.h."""
_GGML_TYPES: Mapping[KvType, int] = {
    "f32": 0, "f16": 1, "q4_0": 2, "q4_1": 3, "q5_0": 6, "q5_1": 7, "q8_0": 8, "iq4_nl": 20, "bf16": 30,
}  # fmt: skip
"""Values of `ggml_type` in ggml.h. The binding does not have names for all of them."""
ENGINE_LOAD_MODES: Mapping[LoadMode, int] = {
    "auto": -1, "none": 0, "mmap": 1, "mlock": 2, "mmap_mlock": 3, "direct_io": 4,
}  # fmt: skip
"""Values of `llama_load_mode` in llama.h, for `llama_model_params.load_mode`."""


def engine_fields(context: ContextSettings) -> dict[str, Value]:
    """Return the fields of `llama_context_params` that depend on the settings alone, as C values.

    They include the YaRN fields for which there is no setting (`FROM_FILE`): llama.cpp uses the model file's values.
    """
    return {
        **FROM_FILE,
        **{setting.key: getattr(context, setting.key) for setting in SETTINGS if setting.engine_field},
        "type_k": _GGML_TYPES[context.type_k],
        "type_v": _GGML_TYPES[context.type_v],
        "flash_attn_type": _FLASH_ATTENTION_TYPES[context.flash_attn],
        "op_offload": bool(context.op_offload),
        "rope_scaling_type": _ROPE_SCALING_TYPES[context.rope_scaling],
    }


def kv_state_values(context: ContextSettings) -> dict[Setting, Value]:
    """Return the values of the settings that a saved KV state depends on.

    Settings that are marked as `rare` are left out if they have their default.
    """
    values = {setting: getattr(context, setting.key) for setting in SETTINGS if setting.in_kv_state}
    return {setting: value for setting, value in values.items() if not setting.rare or value != setting.default}


def for_draft_model(context: ContextSettings) -> ContextSettings:
    """Return the settings with defaults in place of the values that suit one model only."""
    reset = {setting.key: setting.default for setting in SETTINGS if setting.of_model}
    return msgspec.structs.replace(context, **reset)


def parse_context(item: JsonObject) -> ContextSettings:
    """Return the settings in a JSON object, with defaults for missing keys.

    Raises:
        EngineError: a key is unknown or a value is invalid. The message contains the path of the key. The class of the
            error depends on the kind of document, such as `LayoutError` for a layout file.
    """
    # An unknown key is an error. A misspelt one would otherwise load with a default, and nobody would notice.
    item.allow(*KEYS)
    named: dict[str, Any] = {
        setting.key: setting.kind.read(item, setting.key) for setting in SETTINGS if setting.key in item.keys
    }
    return ContextSettings(**named)


def context_document(context: ContextSettings) -> dict[str, object]:
    """Return the settings as a JSON object for a layout file.

    Settings that are marked as `rare` are left out if they have their default.
    """
    values = {setting: getattr(context, setting.key) for setting in SETTINGS}
    return {
        setting.key: setting.kind.written(value)
        for setting, value in values.items()
        if not setting.rare or value != setting.default
    }

"""The table of settings: one record for each key of a layout file's `context`.

Made from it: the parser and the writer of that part of the file, options of the command line, rows of
the settings dialog, what caches of forecasts depend on, and the page `docs/settings.md`. A setting is added here, as a
field of `ContextSettings`, and where it is used.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, get_args

from engine.base.json_file import JsonObject
from engine.base.language import tr
from engine.planning.settings.context_settings import (
    AUTO,
    AUTO_CONTEXT,
    FLASH_ATTENTION_MODES,
    KV_TYPES,
    LOAD_MODES,
    OFFLOAD_MIN_BATCH,
    PIPELINE_MODES,
    ContextSettings,
)
from engine.planning.settings.kinds import Choice, Kind, LeftOpen, Switch, Value, WholeNumber

MAX_TOKENS = (1 << 31) - 1
MAX_SEQUENCES = 256
"""LLAMA_MAX_SEQ."""
MAX_THREADS = 512
"""GGML_MAX_N_THREADS; more is an assertion in the engine."""
CONTEXT_STEP = 256
"""llama.cpp rounds a context up to this many tokens."""

Group = Literal["Context", "Batches", "Computing"]
GROUPS: tuple[Group, ...] = get_args(Group)
Effect = Literal["none", "placement", "context"]
"""What of the memory a setting decides: nothing; which buffers a layout has
(`engine.planning.memory.placement`); or how large caches and graphs are."""

_WORD = LeftOpen(AUTO_CONTEXT, AUTO)
_NULL = LeftOpen(None, None)


@dataclass(frozen=True, slots=True)
class Setting:
    """`label` is its name in a form, `help` a clause on what it does; `decided_by`: the module of
    `engine.planning.plan.decisions` that says what is used and why, empty where nothing is decided.

    `rare`: written to a file only where it is not the default.
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

    @property
    def default(self) -> Value:
        """Our default, as `ContextSettings` has it."""
        value: Value = getattr(ContextSettings(), self.key)
        return value

    @property
    def affects_memory(self) -> bool:
        return self.effect != "none"


SETTINGS: tuple[Setting, ...] = (
    Setting(
        "n_ctx",
        WholeNumber(1, MAX_TOKENS, step=CONTEXT_STEP, left_open=_WORD),
        "--ctx",
        "Context",
        tr("Length in tokens, in all"),
        tr("context length in tokens; auto: as long as is sensible on these devices and fits"),
        "context",
        decided_by="context_length",
    ),
    Setting(
        "n_batch",
        WholeNumber(1, MAX_TOKENS),
        "--batch",
        "Batches",
        tr("Batch in tokens"),
        tr("tokens of a prompt that are handed over at a time"),
        "context",
        decided_by="context_length",
    ),
    Setting(
        "n_ubatch",
        WholeNumber(1, MAX_TOKENS),
        "--ubatch",
        "Batches",
        tr("Micro batch in tokens"),
        tr("physical batch in tokens: what is computed at a time; a smaller one needs smaller compute buffers"),
        "context",
        decided_by="context_length",
    ),
    Setting(
        "n_seq_max",
        WholeNumber(1, MAX_SEQUENCES, "sequences"),
        "--sequences",
        "Context",
        tr("Requests at a time"),
        tr("requests answered at a time; they share the context"),
        "context",
        decided_by="context_length",
    ),
    Setting(
        "type_k",
        Choice(KV_TYPES, "T"),
        "--type-k",
        "Context",
        tr("K cache"),
        tr("type of the K cache"),
        "context",
        decided_by="attention",
    ),
    Setting(
        "type_v",
        Choice(KV_TYPES, "T"),
        "--type-v",
        "Context",
        tr("V cache"),
        tr("type of the V cache; one of blocks (q8_0 and below) needs flash attention"),
        "context",
        decided_by="attention",
    ),
    Setting(
        "flash_attn",
        Choice(FLASH_ATTENTION_MODES),
        "--flash-attn",
        "Context",
        tr("Flash attention"),
        tr("attention in one operation, which saves memory and time; auto: where every device can"),
        "context",
        decided_by="attention",
    ),
    Setting(
        "offload_kqv",
        Switch(),
        "--offload-kqv",
        "Context",
        tr("Cache with its layer"),
        tr("the KV cache lies on the device of its layer, rather than in host memory"),
        "context",
    ),
    Setting(
        "op_offload",
        Switch(with_auto=True),
        "--op-offload",
        "Computing",
        tr("Op offload"),
        tr("devices compute large batches with CPU weights"),
        "context",
        decided_by="op_offload",
    ),
    Setting(
        "op_offload_min_batch",
        WholeNumber(1, MAX_TOKENS, left_open=_NULL),
        "--op-offload-min-batch",
        "Computing",
        tr("Op offload from"),
        tr(
            "from how many tokens on they do; auto: the engine's own, {offload_min_batch}",
            offload_min_batch=OFFLOAD_MIN_BATCH,
        ),
        "context",
        decided_by="op_offload",
        rare=True,
    ),
    Setting(
        "swa_full",
        Switch(),
        "--swa-full",
        "Context",
        tr("Whole windows"),
        tr("layers that look back a window only get a cache for the whole context all the same"),
        "context",
    ),
    Setting(
        "kv_unified",
        Switch(),
        "--kv-unified",
        "Context",
        tr("One cache for all"),
        tr("sequences take what they need of one cache, rather than equal parts"),
        "context",
    ),
    Setting(
        "load_mode",
        Choice(LOAD_MODES),
        "--load-mode",
        "Computing",
        tr("Read the file"),
        tr("how the file is read"),
        "placement",
        decided_by="load_mode",
    ),
    Setting(
        "threads",
        WholeNumber(1, MAX_THREADS, "threads", left_open=_NULL),
        "--threads",
        "Computing",
        tr("Threads for answers"),
        tr("threads for answers; auto: one on each full core"),
        "none",
        decided_by="threads",
    ),
    Setting(
        "threads_batch",
        WholeNumber(1, MAX_THREADS, "threads", left_open=_NULL),
        "--threads-batch",
        "Computing",
        tr("Threads for prompts"),
        tr("threads for prompts; auto: as many as for answers"),
        "none",
        decided_by="threads",
    ),
    Setting(
        "pipeline",
        Choice(PIPELINE_MODES),
        "--pipeline",
        "Batches",
        tr("Pipeline"),
        tr(
            "devices compute parts of a long prompt, or of several, at the same time, for which they "
            "keep copies of what they hand on; auto: where that gains and there is room"
        ),
        "placement",
        decided_by="pipeline",
        rare=True,
    ),
)

KEYS: tuple[str, ...] = tuple(setting.key for setting in SETTINGS)


def memory_part(context: ContextSettings) -> tuple[Value, ...]:
    """Return the values of `context` that memory depends on: what numbers of the engine may be kept by."""
    return tuple(getattr(context, setting.key) for setting in SETTINGS if setting.affects_memory)


def parse_context(item: JsonObject) -> ContextSettings:
    """Return what the object says; what it does not name is at its default. Refuses through `item`."""
    item.allow(*KEYS)
    named: dict[str, Any] = {
        setting.key: setting.kind.read(item, setting.key) for setting in SETTINGS if setting.key in item.keys
    }
    return ContextSettings(**named)


def context_document(context: ContextSettings) -> dict[str, object]:
    """Return the settings as a file has them."""
    values = {setting: getattr(context, setting.key) for setting in SETTINGS}
    return {
        setting.key: setting.kind.written(value)
        for setting, value in values.items()
        if not setting.rare or value != setting.default
    }

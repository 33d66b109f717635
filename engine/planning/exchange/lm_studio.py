"""Export of a plan to LM Studio, as a load configuration (`LLMLoadModelConfig` of its Python and TypeScript SDKs)."""

from __future__ import annotations

import json
from collections.abc import Iterator

from engine.base.language import tr
from engine.planning.exchange.exported import Exported, lost_placement, lost_settings, offloaded_layers
from engine.planning.plan.plan import Plan

PROGRAM = "LM Studio"
_SUPPORTED = frozenset(
    {"n_ctx", "n_ubatch", "n_batch", "n_seq_max", "kv_unified", "type_k", "type_v", "flash_attn", "offload_kqv",
     "load_mode"}
)  # fmt: skip
_CACHE_TYPES = ("f32", "f16", "q8_0", "q4_0", "q4_1", "iq4_nl", "q5_0", "q5_1")


def export_lm_studio(plan: Plan) -> Exported:
    """Return the plan as LM Studio's load configuration in JSON.

    Raises:
        RuleViolationError: the plan breaks a rule of llama.cpp.
        LayoutError: the layout cannot be translated.
    """
    used = plan.settings
    positions = plan.model.n_layers + 1
    offloaded = offloaded_layers(plan)
    config: dict[str, object] = {
        "contextLength": used.n_ctx_each,
        "maxParallelPredictions": used.n_seq_max,
        "useUnifiedKvCache": used.kv_unified,
        "evalBatchSize": used.n_ubatch,
        "gpu": {"ratio": "off" if not offloaded else min(1.0, round(offloaded / positions, 4))},
        "offloadKVCacheToGpu": used.offload_kqv,
        "tryMmap": used.load_mode in ("auto", "mmap", "mmap_mlock"),
        "keepModelInMemory": used.load_mode in ("mlock", "mmap_mlock"),
    }
    if used.flash_attn != "auto":
        config["flashAttention"] = used.flash_attn == "on"
    for key, kind in (("llamaKCacheQuantizationType", used.type_k), ("llamaVCacheQuantizationType", used.type_v)):
        if kind in _CACHE_TYPES:
            config[key] = kind
    notes = (
        *_notes(plan, offloaded, positions),
        *lost_placement(plan, PROGRAM),
        *lost_settings(plan, PROGRAM, _SUPPORTED),
    )
    return Exported(json.dumps(config, indent=2) + "\n", notes, "lm-studio-config.json")


def _notes(plan: Plan, offloaded: int, positions: int) -> Iterator[str]:
    used = plan.settings
    yield tr(
        'For LM Studio\'s SDK: import the model with `lms import {path}`, then call client.llm.load("model", '
        "config=…) with this text as config.",
        path=plan.model.paths[0],
    )
    if 0 < offloaded < positions:
        yield tr(
            "In LM Studio the number of offloaded layers ({offloaded} of {positions}) is set as a share and rounded, "
            "so it may differ by one.",
            offloaded=offloaded,
            positions=positions,
        )
    lost = [kind for kind in dict.fromkeys((used.type_k, used.type_v)) if kind not in _CACHE_TYPES]
    if lost:
        yield tr("LM Studio has no cache type {types}; the export leaves this setting out.", types=", ".join(lost))
    if used.n_batch != used.n_ubatch:
        yield tr(
            "LM Studio has one setting for batch and micro batch. The export sets it to the micro batch size, "
            "{n_ubatch}, because that determines the memory.",
            n_ubatch=used.n_ubatch,
        )
    if used.load_mode == "direct_io":
        yield tr("LM Studio has no load mode direct_io; the export turns mmap off instead.")
    for adapter in plan.edit.side_files.adapters:
        yield tr("{file} was not exported: LM Studio cannot load adapters.", file=adapter.path.name)
    if plan.edit.side_files.draft is not None:
        yield tr("The draft model was not exported. Choose the draft model in LM Studio, under Speculative Decoding.")
    if plan.edit.side_files.projector is not None:
        yield tr(
            "LM Studio finds a projector only in the folder of the model; put {file} there.",
            file=plan.edit.side_files.projector.path.name,
        )

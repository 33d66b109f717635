"""Decisions on flash attention and on the types of the K and V cache."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import msgspec

from engine.base.language import tr
from engine.base.values import replace
from engine.devices.device import CPU_ID, Rig
from engine.model.gguf.model_file import ModelFile
from engine.model.gguf.tensor_table import TYPES_BY_NAME
from engine.planning.layout.cache_rules import (
    KV_BLOCK_ELEMENTS,
    block_remedy,
    cache_violations,
    without_flash_attention,
)
from engine.planning.layout.layout import Layout, Violation
from engine.planning.layout.rules import flash_fault
from engine.planning.memory.model_memory import ModelMemory
from engine.planning.plan.decisions.decision import Decision
from engine.planning.settings.context_settings import KV_TYPES, ContextSettings, FlashAttention, KvType

_USUAL_TYPE: KvType = "f16"
_CACHE_RULES = ("flash_attention", "cache_block_size", "cache_types_differ")


def usable_flash_attention(rig: Rig, layout: Layout, asked: ContextSettings, model: ModelFile) -> FlashAttention:
    """Return the flash attention setting for the load.

    It is the user's setting, except that "auto" becomes "off" if a device of the layout computes flash attention
    wrongly, according to its self-test. "auto" stays if the split mode or a quantised V cache needs flash attention.

    `asked`: settings as the user left them.
    """
    needed = layout.split_mode == "tensor" or KV_BLOCK_ELEMENTS[asked.type_v] > 1
    # If flash attention is needed, "off" would break another rule. The fault is then reported as a violation.
    if asked.flash_attn != "auto" or needed or flash_fault(layout, rig, asked, model) is None:
        return asked.flash_attn
    return "off"


def decide_flash_attention(
    memory: ModelMemory, rig: Rig, layout: Layout, used: ContextSettings, asked: FlashAttention
) -> Decision:
    """Return the decision on flash attention.

    Its value is the one that llama.cpp is expected to use; "auto" if that is unknown.

    `used`: settings for the load.
    `asked`: value that the user chose.
    """
    # The setting that the child gets stays "auto": llama.cpp then checks the devices itself (`llama_context` reserves a
    # graph and looks where flash attention would run).
    model = memory.model
    if used.flash_attn == "off" and asked == "auto":
        found = flash_fault(layout, rig, replace(used, flash_attn=asked), model)
        reason = (
            ""
            if found is None
            else tr("Flash attention does not work correctly on {id}: {reason}", id=found[0].id, reason=found[1].reason)
        )
        return Decision("flash_attn", "off", reason)
    if used.flash_attn == "off":
        return Decision("flash_attn", "off", tr("Set explicitly."), True)
    if without_flash_attention(model, used):
        return Decision(
            "flash_attn",
            "off",
            tr(
                "The engine does not support flash attention for {architecture} models.",
                architecture=model.architecture,
            ),
        )
    # llama.cpp does not check the devices then: the scheduler gives unsupported operations to the CPU.
    if used.flash_attn == "on":
        return Decision(
            "flash_attn",
            "on",
            tr("Set explicitly. If a device does not support flash attention, the CPU computes the attention."),
            True,
        )
    if layout.split_mode == "tensor":
        return Decision("flash_attn", "on", tr("Split mode tensor needs flash attention."))
    if KV_BLOCK_ELEMENTS[used.type_v] > 1:
        return Decision("flash_attn", "on", tr("Needed by the {type_v} V cache.", type_v=used.type_v))
    # There are no forecasts for mode row, nor for a layout of another model.
    is_known = layout.n_layers == model.n_layers and layout.split_mode != "row"
    uses = memory.uses_flash_attention(layout, used, rig) if is_known else None
    if uses is None:
        return Decision(
            "flash_attn", "auto", tr("llama.cpp decides during the load whether the devices use flash attention.")
        )
    if uses:
        return Decision(
            "flash_attn", "on", tr("All devices of the layout support flash attention, which saves memory and time.")
        )
    where = ", ".join(device for device in layout.devices if device != CPU_ID) or CPU_ID
    return Decision(
        "flash_attn",
        "off",
        tr("Not all devices that hold layers ({devices}) support flash attention for this model.", devices=where),
    )


def decide_cache_types(model: ModelFile, used: ContextSettings) -> Iterator[Decision]:
    """Yield the decisions on the K and V cache types. If llama.cpp refuses a type, the decision's reason says why.

    `used`: settings for the load.
    """
    for setting, cache_type, letter in (("type_k", used.type_k, "K"), ("type_v", used.type_v, "V")):
        refused = _refusal(model, used, letter)
        chosen = cache_type != _USUAL_TYPE
        usual = (
            tr("Set explicitly: {compared}.", compared=_compared(cache_type))
            if chosen
            else tr("Full quality; the type q8_0 takes about half the memory.")
        )
        yield Decision(setting, cache_type, refused or usual, chosen)


def refused_cache_types(model: ModelFile, used: ContextSettings) -> Mapping[str, Mapping[KvType, str]]:
    """Return the reason for each cache type that llama.cpp refuses for `model`, by setting (`type_k`, `type_v`).

    `used`: other settings for the load, on which the result depends.
    """
    found: dict[str, dict[KvType, str]] = {"type_k": {}, "type_v": {}}
    for setting, letter in (("type_k", "K"), ("type_v", "V")):
        for cache_type in KV_TYPES:
            tried = msgspec.structs.replace(used, **{setting: cache_type})
            refused = _refusal(model, tried, letter)
            if refused is not None:
                found[setting][cache_type] = refused
    return found


def _refusal(model: ModelFile, context: ContextSettings, letter: str) -> str | None:
    """Return why llama.cpp refuses the type of the K or V cache; None if it accepts the type. `letter`: K or V."""
    broken = (each for each in cache_violations(model, context) if each.rule in _CACHE_RULES)
    return next((each.message for each in broken if _is_about(each, letter)), None)


def _is_about(violation: Violation, letter: str) -> bool:
    """Return whether a violation is about the cache that `letter` names ("K" or "V"), or about both caches."""
    if violation.rule == "flash_attention":
        return letter == "V"
    return violation.rule == "cache_types_differ" or violation.remedy == block_remedy(letter)


def _compared(cache_type: KvType) -> str:
    kind, usual = TYPES_BY_NAME[cache_type], TYPES_BY_NAME[_USUAL_TYPE]
    # A block of F16 is one element.
    share = kind.block_bytes / kind.block_elements / usual.block_bytes
    if share == 1:
        return tr("as much memory as {usual_type}", usual_type=_USUAL_TYPE)
    if share > 1:
        return tr("{share:.0%} more memory than {usual_type}", share=share - 1, usual_type=_USUAL_TYPE)
    return tr("{share:.0%} less memory than {usual_type}", share=1 - share, usual_type=_USUAL_TYPE)

"""Rules of split mode tensor: which models, which weights elsewhere, which settings.

Found in the engine's source (`llm_arch_supports_sm_tensor`, `llama_meta_device_get_split_state`) and, where that aborts
or computes nonsense, by loading on RPC workers.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from engine.architectures.registry import architecture_rules
from engine.devices.device import CPU_ID
from engine.gguf.model_file import Block, ModelFile
from engine.language import tr
from engine.layout.engine_parameters import TensorOverride, leading_cpu_layers, tensor_overrides
from engine.layout.layout import Layout
from engine.layout.patterns import pattern_finder
from engine.layout.unlisted_layers import count_unlisted_layers
from engine.layout.violation import Violation
from engine.settings.context_settings import ContextSettings

_FEED_FORWARD = re.compile(r"ffn_(gate_up|gate|up|down)((?:_(?:ch)?exps|_shexp)?)\.(?:weight|bias)")
_MIRRORED = re.compile(r"\w*norm\w*\..*|ffn_gate_inp(?:_\w+)?\..*|attn_output\.(?:weight|bias)")
"""Weights that may leave the members one by one: those that each has whole, and the ends of both halves of a layer."""


def tensor_model_violations(model: ModelFile, leading: int = 0) -> Iterator[Violation]:
    """Yield why the model cannot be split inside its layers, with so many of them on the CPU."""
    split = architecture_rules(model.architecture).split
    if not split.allowed:
        yield Violation(
            "split_architecture",
            tr("The engine cannot split {architecture} models inside their layers.", architecture=model.architecture),
            tr("Choose split mode layer, which divides the model between layers."),
        )
    elif count_unlisted_layers(model):
        yield Violation(
            "split_architecture",
            tr(
                "The engine cannot split layers that it repeats or adds, as it does for this {architecture} model.",
                architecture=model.architecture,
            ),
            tr("Choose split mode layer, which divides the model between layers."),
        )
    elif split.may_lack_heads and _lacks_heads(model, leading):
        yield Violation(
            "split_architecture",
            tr(
                "The engine cannot split this {architecture} model: some of its layers have no key heads.",
                architecture=model.architecture,
            ),
            tr("Choose split mode layer, which divides the model between layers."),
        )
    elif leading and split.whole_model:
        yield Violation(
            "leading_cpu_only",
            tr(
                "In split mode tensor {architecture} models cannot have layers on the CPU.",
                architecture=model.architecture,
            ),
            tr("Move the CPU layers to the devices, or choose split mode layer."),
        )


def _lacks_heads(model: ModelFile, leading: int) -> bool:
    heads = model.hyper_parameter("attention.head_count_kv")
    return 0 in heads[leading:] if isinstance(heads, tuple) else heads == 0


def tensor_context_violations(context: ContextSettings) -> Iterator[Violation]:
    """Yield settings that split mode tensor cannot have."""
    if context.flash_attn == "off":
        yield Violation(
            "flash_attention",
            tr("Split mode tensor needs flash attention, which is off."),
            tr("Set flash attention to auto or on."),
        )
    if not context.offload_kqv:
        yield Violation(
            "split_cache_on_host",
            tr("In split mode tensor the engine computes wrong results where the KV cache stays in host memory."),
            tr("Turn on offloading of the KV cache (offload_kqv), or choose split mode layer."),
        )


def tensor_override_violations(layout: Layout, model: ModelFile) -> Iterator[Violation]:
    """Yield overrides that abort the engine in split mode tensor, at most one of each kind."""
    target = next((override.device for override in layout.overrides if override.device != CPU_ID), None)
    if target is not None:
        yield Violation(
            "split_override",
            tr(
                "In split mode tensor weights can only be moved to the CPU, and an override moves some to {target}.",
                target=target,
            ),
            tr(
                "Send the override to the CPU, or choose split mode layer, where {target} can take them.", target=target
            ),
        )
    leading = leading_cpu_layers(layout)
    rules = tensor_overrides(layout)
    name = next((name for block in model.blocks[leading:] if (name := _inseparable(block, rules)) is not None), None)
    if rules and name is not None:
        yield Violation(
            "split_override",
            tr(
                "In split mode tensor an override cannot move {name} away from the weights that it works with.",
                name=name,
            ),
            tr("Override whole feed-forward parts (ffn, experts), or choose split mode layer."),
        )


def _inseparable(block: Block, overrides: tuple[TensorOverride, ...]) -> str | None:
    """Return a weight that the overrides tear from its fellows, None if there is none."""
    finders = [pattern_finder(override.pattern) for override in overrides]
    moved, stayed = [], set()
    for tensor in block.tensors:
        stem = tensor.name.split(".", 2)[-1]
        if any(finds(tensor.name) for finds in finders):
            moved.append((tensor.name, stem))
        elif match := _FEED_FORWARD.fullmatch(stem):
            stayed.add(match[2])
    for name, stem in moved:
        match = _FEED_FORWARD.fullmatch(stem)
        if match is None:
            if not _MIRRORED.fullmatch(stem):
                return name
        elif match[1] != "down" and match[2] in stayed:
            return name
    return None

"""A plan's layout as options of llama.cpp's programs: `-dev`, `-ngl`, `-ts` and `-ot`.

llama.cpp's library accepts the CPU as an entry of the device list, but its programs refuse it (`parse_device_list`).
So CPU layers between two devices are counted for the first of these devices, and `-ot` puts their weights on the CPU.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from msgspec import Struct

from engine.base.language import tr
from engine.devices.device import CPU_ID
from engine.model.gguf.model_file import ModelFile
from engine.planning.layout.engine_parameters import MATCHES_NO_TENSOR, EngineParameters, TensorOverride
from engine.planning.layout.layout import Override, layer_text
from engine.planning.layout.patterns import pattern_finder
from engine.planning.layout.split_modes import count_unlisted_layers
from engine.planning.plan.plan import Plan

EXPERTS = r"\.ffn_(up|down|gate|gate_up)_(ch|)exps"
"""`LLM_FFN_EXPS_REGEX` of llama.cpp: the weights of `--cpu-moe`."""
MAX_SPLIT = 15
"""Largest number of values that option `-ts` accepts: one less than `llama_max_devices`."""
# Without an output.weight, llama.cpp loads token_embd a second time as the output layer (`TENSOR_DUPLICATED`).
_OUTPUT = r"^(output|output_norm|token_embd)\."
# A repeated group takes exponential time with `std::regex`; a comma or an equals sign ends the pattern of `-ot`.
_UNSAFE = re.compile(r"[,=\x00-\x1f]|\)[*+{]")


class PlacementWords(Struct, frozen=True):
    """A plan's layout as values for options of llama.cpp's programs.

    `devices`: device ids for `-dev`.
    `counts`: numbers for `-ts`: layers of each device, or its share in modes tensor and row.
    `overrides`: overrides for `-ot`, or the words of another option with the same effect.
    `notes`: sentences for the user on differences from the plan.
    """

    devices: tuple[str, ...]
    counts: tuple[float, ...]
    n_gpu_layers: int
    split_mode: str
    main_gpu: int
    overrides: tuple[TensorOverride | tuple[str, ...], ...]
    notes: tuple[str, ...]


def placement_words(plan: Plan) -> PlacementWords:
    """Return a plan's layout as values for options of llama.cpp's programs.

    Raises:
        RuleViolationError: the plan breaks a rule of llama.cpp.
        LayoutError: the layout cannot be translated.
    """
    parameters = plan.parameters
    overrides = tuple(_overrides(plan))
    if parameters.split_mode in ("tensor", "row"):
        shares = parameters.tensor_split[: len(parameters.devices)]
        return PlacementWords(
            parameters.devices,
            shares,
            parameters.n_gpu_layers,
            parameters.split_mode,
            parameters.main_gpu,
            overrides,
            (),
        )
    entries, moved = _without_cpu(parameters, plan.model)
    several = len(entries) > 1
    # No option disables pipeline parallelism. llama.cpp does so if there are overrides, even one that matches no tensor
    # (`has_tensor_overrides`).
    stop = () if overrides or moved or plan.settings.pipeline == "on" else (TensorOverride(MATCHES_NO_TENSOR, CPU_ID),)
    return PlacementWords(
        tuple(device for device, _ in entries),
        tuple(count for _, count in entries),
        parameters.n_gpu_layers,
        parameters.split_mode if not several else "layer",
        0,
        (*overrides, *(TensorOverride(pattern, CPU_ID) for pattern, _ in moved), *(stop if several else ())),
        tuple(note for _, note in moved),
    )


def _without_cpu(
    parameters: EngineParameters, model: ModelFile
) -> tuple[list[tuple[str, float]], list[tuple[str, str]]]:
    """Return two lists: the layout's device list without CPU entries, and the weights that `-ot` keeps on the CPU.

    The first list has (device id, number of layers) for each entry. CPU layers are counted for the device before them.
    The second list has (regex, note for the user) for the weights of these CPU layers.
    """
    listed = list(zip(parameters.devices, parameters.tensor_split, strict=False))
    first = next((device for device, _ in listed if device != CPU_ID), None)
    if first is None:
        return [], []
    output = model.n_layers + count_unlisted_layers(model)
    position = output + 1 - parameters.n_gpu_layers
    entries: list[tuple[str, float]] = []
    moved: list[tuple[str, str]] = []
    for device, count in listed:
        base = device if device != CPU_ID else (entries[-1][0] if entries else first)
        if device == CPU_ID and count:
            moved += _moved(position, position + int(count) - 1, output, base)
        # Neighbours on one device are one entry, except an entry without layers, which an override needs.
        if entries and entries[-1][0] == base:
            entries[-1] = (base, entries[-1][1] + count)
        else:
            entries.append((base, count))
        position += int(count)
    return entries, moved


def _moved(first: int, last: int, output: int, base: str) -> Iterator[tuple[str, str]]:
    """Yield pairs (regex for `-ot`, note for the user) that keep the weights of layers `first` to `last` on the CPU.

    `output`: index of the output layer.
    `base`: id of the device that gets the rest of these layers, because a device list cannot contain the CPU.
    """
    blocks = range(first, min(last + 1, output))
    if blocks:
        yield (
            rf"^blk\.({'|'.join(map(str, blocks))})\.",
            tr(
                "{layers} on {cpu} cannot be exported, because a device list cannot contain {cpu}. The option -ot "
                "keeps their weights on {cpu}, but their KV cache and attention are on {device}.",
                layers=_capital(layer_text(blocks[0], blocks[-1])),
                cpu=CPU_ID,
                device=base,
            ),
        )
    if last >= output:
        yield (
            _OUTPUT,
            tr(
                "The output layer on {cpu} cannot be exported, because a device list cannot contain {cpu}. The option "
                "-ot keeps the weights of the output layer on {cpu}; {device} computes the rest of the layer.",
                cpu=CPU_ID,
                device=base,
            ),
        )


def _capital(text: str) -> str:
    return f"{text[:1].upper()}{text[1:]}"


def _overrides(plan: Plan) -> Iterator[TensorOverride | tuple[str, ...]]:
    """Yield the plan's overrides in order: regex and device id, or the arguments of an option with the same effect."""
    names = [tensor.name for tensor in plan.model.tensors]
    for override, found in zip(plan.edit.layout.overrides, plan.parameters.overrides, strict=True):
        option = _experts_option(override, found.pattern, names)
        if option:
            yield option
        elif override.pattern is not None and not _UNSAFE.search(override.pattern):
            yield TensorOverride(override.pattern, override.device)
        else:
            yield found


def _experts_option(override: Override, pattern: str, names: list[str]) -> tuple[str, ...]:
    """Return the words of `--cpu-moe` or `--n-cpu-moe` if the option moves the same weights as this override; else
    nothing.

    `pattern`: regex of the override. `names`: names of all tensors.
    """
    if override.part != "experts" or override.device != CPU_ID:
        return ()
    layers = override.layers
    if layers is not None and layers.start:
        return ()
    theirs = EXPERTS if layers is None else rf"^blk\.({'|'.join(map(str, layers))}){EXPERTS}"
    # The regex of the option is not ours, so the matches are compared on the names of this model.
    finds, finds_too = pattern_finder(pattern), re.compile(theirs).search
    if any(finds(name) != bool(finds_too(name)) for name in names):
        return ()
    return ("--cpu-moe",) if layers is None else ("--n-cpu-moe", str(len(layers)))

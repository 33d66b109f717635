"""Import of commands and files of other programs: parsing, and translation into a layout for a model on a rig."""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Literal, get_args

from msgspec import Struct

from engine.base.errors import EngineError, LayoutError
from engine.base.language import tr
from engine.base.texts import clean, quote
from engine.base.values import replace
from engine.devices.device import CPU_ID, Rig, find_id_error
from engine.model.gguf.model_file import ModelFile
from engine.model.gguf.reader import read_model
from engine.planning.exchange.device_names import DeviceNames
from engine.planning.exchange.foreign_load import ForeignDraft, ForeignLoad, ForeignOverride
from engine.planning.exchange.llama_swap import choose_command, swap_commands
from engine.planning.exchange.ollama import looks_like_modelfile, read_modelfile
from engine.planning.exchange.server_options import NO_DRAFT, kind_of_draft, read_command
from engine.planning.layout.engine_parameters import float32
from engine.planning.layout.layout import (
    Layout,
    Override,
    Run,
    make_layout,
    merge_runs,
    single_device,
    split_evenly,
)
from engine.planning.layout.layout_file import FOLLOWING, DraftEntry
from engine.planning.layout.patterns import OVERRIDE_PARTS, part_pattern
from engine.planning.layout.split_modes import count_unlisted_layers
from engine.planning.settings.context_settings import ContextSettings
from engine.planning.settings.table import DRAFTED_TOKENS

MAX_TEXT = 1 << 18
"""Largest number of characters of a command or file. A longer text is something else, such as a model."""
Source = Literal["command", "llama-swap", "ollama"]
SOURCES: tuple[Source, ...] = get_args(Source)
_YAML = re.compile(r"^\s*(?:models|macros|cmd|healthCheckTimeout)\s*:", re.MULTILINE)
_PART_HEAD = re.compile(r"\^blk\\\.(?:\\d\+|\(([0-9|]{1,4000})\))\\\.", re.ASCII)


class Imported(Struct, frozen=True):
    """A layout with settings, made from options of another program.

    `projector`: path of the projector as written; the file has not been read.
    `adapters`: (path as written, scale) of each LoRA adapter; the files have not been read.
    `projector_device`: device id; None if the program chooses the device.
    `draft`: source of drafted tokens, as in a layout file; None if there is none.
    `notes`: sentences for the user on options that were left out, and on assumptions.
    """

    layout: Layout
    context: ContextSettings
    projector: str = ""
    projector_device: str | None = None
    adapters: tuple[tuple[str, float], ...] = ()
    draft: DraftEntry | None = None
    notes: tuple[str, ...] = ()


def read_foreign(text: str, source: Source | None = None, name: str | None = None) -> ForeignLoad:
    """Parse a command or file of another program, and return its load options.

    `source`: kind of the text; None to detect it.
    `name`: name of the model to load, for a llama-swap configuration with several models.

    Raises:
        LayoutError: the text cannot be parsed.
    """
    if len(text) > MAX_TEXT:
        raise LayoutError(
            tr("the text has {count} characters; at most {most} are read", count=len(text), most=MAX_TEXT)
        )
    if not text.strip():
        raise LayoutError(
            tr("there is no text; paste a command of llama-server, an entry of llama-swap or a Modelfile")
        )
    kind = source or _source_of(text)
    if kind == "ollama":
        return read_modelfile(text)
    if kind == "llama-swap":
        command, environment = choose_command(swap_commands(text), name)
        return read_command(command, environment)
    return read_command(text)


def model_names(text: str) -> tuple[str, ...]:
    """Return the model names of a llama-swap configuration with several models; empty for any other text."""
    if len(text) > MAX_TEXT or not text.strip() or _source_of(text) != "llama-swap":
        return ()
    names = tuple(swap_commands(text))
    return names if len(names) > 1 else ()


def _source_of(text: str) -> Source:
    if looks_like_modelfile(text):
        return "ollama"
    return "llama-swap" if _YAML.search(text) else "command"


def numbered_ids(rig: Rig) -> tuple[str, ...]:
    """Return the ids of the devices in the order in which `-ts` and `--main-gpu` count them.

    Accelerators such as BLAS are not counted.
    """
    return tuple(device.id for device in rig.devices if device.kind != "accel")


def arrange(load: ForeignLoad, model: ModelFile, rig: Rig) -> Imported:
    """Translate another program's load options into layout and settings for `model` on `rig`."""
    return _Arranger(load, model, rig).run()


class _Arranger:
    """Translates a `ForeignLoad` (options of another program) into a layout, and rounds shares as llama.cpp does.

    `notes`: sentences for the user, added during the translation.
    """

    def __init__(self, load: ForeignLoad, model: ModelFile, rig: Rig) -> None:
        self._load = load
        self._model = model
        self._rig = rig
        self._names = DeviceNames(rig, load.servers)
        self._positions = model.n_layers + count_unlisted_layers(model) + 1
        self._missing: list[str] = []
        self.notes = list(load.notes)

    def run(self) -> Imported:
        """Translate the options, and return layout, settings and notes."""
        load = self._load
        layout = self._with_overrides(self._layout())
        device = self._projector_device()
        draft = self._draft()
        if self._missing:
            self.notes.append(
                tr(
                    "The layout uses devices that this computer does not have: {names}. The layout can be loaded "
                    "on a computer that has these devices.",
                    names=", ".join(dict.fromkeys(self._missing)),
                )
            )
            endpoints = {device.endpoint for device in self._rig.devices}
            if unknown := [clean(server) for server in load.servers if server not in endpoints]:
                self.notes.append(
                    tr(
                        "No device of Layerdeck has the address {servers}. To use the devices there, add the RPC "
                        "server and import the text again.",
                        servers=", ".join(dict.fromkeys(unknown)),
                    )
                )
        context = replace(load.context, pipeline="off") if load.stops_pipeline else load.context
        return Imported(layout, context, load.projector, device, load.adapters, draft, tuple(self.notes))

    # ------------------------------------------------------------------ layers

    def _layout(self) -> Layout:
        load, n_layers = self._load, self._model.n_layers
        listed = self._listed()
        if load.split_mode == "none" and listed:
            listed = self._main_only(listed)
        offloaded = self._offloaded(bool(listed))
        if not listed and offloaded and load.devices is None and load.n_gpu_layers is not None:
            self.notes.append(tr("This computer has no device for GPU layers, so all layers are on the CPU."))
        if not listed or not offloaded:
            return make_layout(n_layers, [CPU_ID] * n_layers)
        if self._load.split_mode in ("tensor", "row") and (split := self._split(listed, offloaded)):
            return split
        homes = self._homes(listed, offloaded)
        layout = make_layout(n_layers, homes[:n_layers], homes[-1])
        alone = self._load.split_mode == "none" and len(layout.devices) == 1
        return replace(layout, split_mode="none") if alone else layout

    def _offloaded(self, has_devices: bool) -> int:
        """Return the number of layers on devices other than the CPU, counted back from the output layer.

        If the options do not state the number, all layers count, and a note says so if there are devices.

        `has_devices`: whether there are devices that can hold layers.
        """
        asked = self._load.n_gpu_layers
        if asked is None and has_devices:
            self.notes.append(
                tr(
                    "{program} decides at its start, by free memory, how many layers go to devices. The imported "
                    "layout has all layers on devices; Layout > Propose a Layout finds a layout that fits.",
                    program=self._load.program,
                )
            )
        return self._positions if asked is None else min(max(0, asked), self._positions)

    def _listed(self) -> list[tuple[str, float]]:
        """Return the devices of the options in llama.cpp's order, as (device id, share as in option `-ts`)."""
        load = self._load
        if load.devices is None:
            ids = tuple(map(self._checked, self._names.defaults()))
        else:
            ids = tuple(map(self._device, load.devices))
        shares = dict(enumerate(load.shares))
        given = any(shares.get(index, 0.0) > 0 for index in range(len(ids)))
        if not given and len(ids) > 1 and load.split_mode == "layer":
            self.notes.append(
                tr(
                    "{program} divides layers by free memory at its start. The imported layout divides them by "
                    "the memory that is free now.",
                    program=load.program,
                )
            )
        usual = self._default_shares(ids)
        return [
            (device, shares.get(index, 0.0) if given else usual[index]) for index, device in enumerate(ids) if device
        ]

    def _default_shares(self, ids: Sequence[str]) -> list[float]:
        """Return the share of each device in `ids` as llama.cpp sets it if `-ts` is missing.

        Shares are equal in split modes tensor and row, else proportional to free memory.
        """
        # Split modes tensor and row divide evenly; llama.cpp counts bytes, and never 0.
        if self._load.split_mode in ("tensor", "row"):
            return [1.0] * len(ids)
        devices = [self._rig.device(each) for each in ids]
        free = [float(max(1, device.available_bytes)) for device in devices if device is not None]
        # The memory of a device that the rig lacks is unknown. It counts as the mean of the others.
        mean = sum(free) / len(free) if free else 1.0
        return [mean if device is None else float(max(1, device.available_bytes)) for device in devices]

    def _main_only(self, listed: Sequence[tuple[str, float]]) -> list[tuple[str, float]]:
        index = self._load.main_gpu
        if index < 0:
            return []
        if index >= len(listed):
            self.notes.append(
                tr("Main GPU {index} does not exist; the first device is used.", index=index),
            )
            index = 0
        return [(listed[index][0], 1.0)]

    def _homes(self, listed: Sequence[tuple[str, float]], offloaded: int) -> list[str]:
        """Return the device id of each layer, the output layer last.

        Layers are divided by shares as in llama.cpp's `load_tensors`, also in float32 to get the same rounding.

        `listed`: (device id, share) of each entry of the device list. `offloaded`: number of layers on devices.
        """
        sums = list(accumulate((float32(share) for _, share in listed), lambda a, b: float32(a + b)))
        bounds = [float32(total / sums[-1]) for total in sums]
        # llama.cpp uses `std::upper_bound`: a layer exactly on a bound belongs to the next device.
        positions = (bisect_right(bounds, float32(index / offloaded)) for index in range(offloaded))
        homes = [listed[min(position, len(listed) - 1)][0] for position in positions]
        return [CPU_ID] * (self._positions - offloaded) + homes

    def _split(self, listed: Sequence[tuple[str, float]], offloaded: int) -> Layout | None:
        """Return the layout in mode tensor or row; None if a device is listed twice, which only mode layer allows.

        `listed`: (device id, share) of each device. `offloaded`: number of layers on devices, including the output.
        """
        members = [(device, share) for device, share in listed if share > 0]
        if len({device for device, _ in members}) < len(members):
            self.notes.append(
                tr(
                    "A device is listed twice, which only split mode layer allows, so the imported layout has split "
                    "mode layer."
                )
            )
            return None
        n_layers = self._model.n_layers
        leading = min(self._positions - offloaded, n_layers)
        runs = [Run(CPU_ID, 0, leading - 1)] if leading else []
        if leading < n_layers:
            runs.append(Run(members[0][0], leading, n_layers - 1))
        is_row = self._load.split_mode == "row"
        main = listed[self._load.main_gpu][0] if is_row and 0 <= self._load.main_gpu < len(listed) else None
        return Layout(
            n_layers,
            merge_runs(runs),
            members[0][0],
            self._load.split_mode,
            tuple(members),
            main,
        )

    def _device(self, name: str) -> str:
        """Return the device id for a name in option `-dev`; empty for a name that cannot be a device id.

        A valid name that the rig does not have is used as id, because the layout may be for another computer.
        """
        found = self._names.id_of_device(name)
        if found is None and (name == CPU_ID or find_id_error(name)):
            self.notes.append(tr("{name} cannot hold layers, so this device was not imported.", name=quote(name)))
            return ""
        return self._checked(found or name)

    def _checked(self, device_id: str) -> str:
        """Return `device_id`. If the rig lacks the device, record it for the note that lists missing devices."""
        if self._rig.device(device_id) is None:
            self._missing.append(clean(device_id))
        return device_id

    def _projector_device(self) -> str | None:
        name = self._load.projector_device
        if not name or not self._load.projector:
            return None
        return CPU_ID if name == "none" else self._device(name) or None

    # ------------------------------------------------------------------ draft

    def _draft(self) -> DraftEntry | None:
        asked = self._load.draft
        if asked is None or NO_DRAFT in asked.types:
            return None
        # A draft model alone is used without a type, as by llama-server.
        types = asked.types or ("draft",)
        kind = next((found for each in types if (found := kind_of_draft(each)) is not None), None)
        if kind is None:
            return None
        tokens = DRAFTED_TOKENS if asked.n_tokens is None else asked.n_tokens
        if kind != "model" or not asked.model:
            return DraftEntry(kind, n_tokens=tokens) if kind != "model" else None
        context = replace(FOLLOWING, type_k=asked.type_k, type_v=asked.type_v)
        return DraftEntry("model", asked.model, tokens, self._draft_layout(asked), context)

    def _draft_layout(self, asked: ForeignDraft) -> Layout | None:
        """Return the layout of a draft model. None if the options state no layout, or if its file cannot be read.

        `asked`: options of speculative decoding in the command.
        """
        if asked.n_gpu_layers is None and asked.devices is None:
            return None
        path = Path(asked.model).expanduser()
        try:
            n_layers = read_model(path).n_layers
        except (EngineError, RuntimeError):
            self.notes.append(
                tr(
                    "The file {name} cannot be read, so the device of the draft model is chosen automatically.",
                    name=clean(path.name),
                )
            )
            return None
        names = self._load.devices if asked.devices is None else asked.devices
        devices = numbered_ids(self._rig) if names is None else tuple(filter(None, map(self._device, names)))
        wanted = n_layers + 1 if asked.n_gpu_layers is None else asked.n_gpu_layers
        # As `load_tensors`: the last layers are on devices, the output layer counts as one.
        leading = max(0, n_layers + 1 - wanted) if devices else n_layers
        if leading >= n_layers:
            return single_device(n_layers, CPU_ID)
        on_devices = split_evenly(n_layers - leading, devices[: n_layers - leading]).assignment()
        return make_layout(n_layers, [CPU_ID] * leading + list(on_devices))

    # ------------------------------------------------------------------ overrides

    def _with_overrides(self, layout: Layout) -> Layout:
        for each in self._load.overrides:
            override = self._override(each)
            if override is None:
                continue
            try:
                layout = replace(layout, overrides=(*layout.overrides, override))
            except LayoutError as error:
                self.notes.append(
                    tr(
                        "The override {pattern} was not imported: {reason}.",
                        pattern=quote(each.pattern),
                        reason=error.reason,
                    )
                )
        return layout

    def _override(self, each: ForeignOverride) -> Override | None:
        n_layers = self._model.n_layers
        if each.n_experts is not None:
            last = min(each.n_experts, n_layers) - 1
            return Override(CPU_ID, "experts", *((None, None) if not each.n_experts else (0, last)))
        device = self._names.id_of_buffer(each.buffer)
        if device is None:
            if find_id_error(each.buffer):
                self.notes.append(
                    tr(
                        "The override {pattern} was not imported: no device here has the buffer type {buffer}.",
                        pattern=quote(each.pattern),
                        buffer=quote(each.buffer),
                    )
                )
                return None
            device = self._checked(each.buffer)
        return next(_parts(each.pattern, device, n_layers), Override(device, pattern=each.pattern))


def _parts(pattern: str, device: str, n_layers: int) -> Iterator[Override]:
    """Yield an override of a layer part, such as experts, if `pattern` is exactly our regex for that part.

    Nothing is yielded for any other pattern.

    `device`: id of the device to which the override moves the part. `n_layers`: number of the model's layers.
    """
    head = _PART_HEAD.match(pattern)
    if head is None:
        return
    numbers = [int(number) for number in (head[1] or "").split("|") if number]
    layers = range(numbers[0], numbers[-1] + 1) if numbers else None
    if layers is not None and (len(layers) != len(numbers) or layers.stop > n_layers):
        return
    for part in OVERRIDE_PARTS:
        if part_pattern(part, layers) == pattern:
            yield Override(device, part, *((None, None) if layers is None else (layers.start, layers.stop - 1)))

"""`Layout`: a frozen value with the device of each layer; every operation returns another layout.

The module also formats ranges of layers and has `Violation`, one restriction of llama.cpp that a layout breaks.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from itertools import groupby, pairwise
from typing import Literal

from msgspec import Struct

from engine.base.errors import LayoutError
from engine.base.language import tr
from engine.base.values import replace
from engine.devices.device import CPU_ID
from engine.planning.layout.patterns import OVERRIDE_PARTS, OverridePart, find_pattern_error


def range_text(first: int, last: int) -> str:
    """Return a range of layers as text: "5" if both ends are equal, else "5-9", as in layout files."""
    return str(first) if first == last else f"{first}-{last}"


def layer_text(first: int, last: int) -> str:
    """Return a range of layers in the user's language: "layer 5" or "layers 5-9"."""
    text = range_text(first, last)
    return tr("layer {first}", first=text) if first == last else tr("layers {ranges}", ranges=text)


class Violation(Struct, frozen=True):
    """One restriction of llama.cpp that a layout or its settings break, so that the model cannot be loaded.

    `rule`: stable identifier such as `too_many_entries`.
    `message`: sentence for the user.
    `remedy`: sentence on how to change the layout or the settings.
    """

    rule: str
    message: str
    remedy: str


SplitMode = Literal["layer", "none", "tensor", "row"]
SPLIT_MODES: tuple[SplitMode, ...] = ("layer", "none", "tensor", "row")
MAX_LAYERS = 65536
"""Largest number of layers of a layout. llama.cpp allows 512 (`LLAMA_MAX_LAYERS`).

A mistyped range must not fill memory.
"""


class Run(Struct, frozen=True):
    """Neighbouring layers on one device: layers `first` to `last`, both included."""

    device: str
    first: int
    last: int

    @property
    def length(self) -> int:
        return self.last - self.first + 1


class Override(Struct, frozen=True):
    """An override: weights that are placed on `device`, not on the device of their layer. The KV cache is not moved.

    The weights are either the `part` of layers `first` to `last`, both included (None: of all layers), or the tensors
    whose name matches the regex `pattern`.
    """

    device: str
    part: OverridePart | None = None
    first: int | None = None
    last: int | None = None
    pattern: str | None = None

    @property
    def layers(self) -> range | None:
        """Range of the layers whose part is moved; None for all layers."""
        return None if self.first is None or self.last is None else range(self.first, self.last + 1)


class Layout(Struct, frozen=True):
    """The device of each layer, of the output layer and of overrides, and llama.cpp's split mode.

    `n_layers`: number of layers, without the output layer.
    `runs`: neighbouring layers on one device; they cover layers 0 to `n_layers` - 1 in order.
    `tensor_split`: (device id, share) of each device that has a part of every layer; only in modes tensor and row.
    `main_device`: device id of llama.cpp's `main_gpu`, only in mode row; None for the first device with a share.

    The constructor raises `LayoutError` with the location of the fault if the layout is invalid. Operations raise it if
    a layer or boundary does not exist.
    An output layer on the device of the last layer moves with that layer; any other output layer stays where it is. In
    mode none, moving a part to another device changes the mode to layer.
    """

    n_layers: int
    runs: tuple[Run, ...]
    output_device: str
    split_mode: SplitMode = "layer"
    tensor_split: tuple[tuple[str, float], ...] = ()
    main_device: str | None = None
    overrides: tuple[Override, ...] = ()

    def __post_init__(self) -> None:
        check_cover(self.n_layers, self.runs)
        for index, (run, following) in enumerate(pairwise(self.runs)):
            if run.device == following.device:
                raise LayoutError(
                    tr(
                        "runs {index} and {next_index} are both on {device}; merge them into one run",
                        index=index,
                        next_index=index + 1,
                        device=run.device,
                    ),
                    location="runs",
                )
        if not self.output_device:
            raise LayoutError(tr("the output layer needs a device"), location="output")
        _check_split(self)
        for index, override in enumerate(self.overrides):
            _check_override(self.n_layers, override, f"overrides[{index}]")

    @property
    def devices(self) -> tuple[str, ...]:
        """Ids of the devices that have layers or the output layer, each once, in layer order."""
        return tuple(dict.fromkeys([*(run.device for run in self.runs), self.output_device]))

    def device_of(self, layer: int) -> str:
        """Return the device of `layer`; `layer` == `n_layers` is the output layer."""
        if layer == self.n_layers:
            return self.output_device
        self._check_layer(layer)
        # `check_cover` made sure that runs are in order and without gaps, so the first run that ends here or later is
        # the one.
        return next(run.device for run in self.runs if layer <= run.last)

    def assignment(self) -> tuple[str, ...]:
        """Return the device id of each layer, in layer order; the output layer is not included."""
        return tuple(run.device for run in self.runs for _ in range(run.length))

    def move_boundary(self, boundary_index: int, layer: int) -> Layout:
        """Return the layout in which run `boundary_index` ends before `layer` and the next run begins with `layer`.

        A run is neighbouring layers on one device.
        `layer` is clamped so that both runs keep at least one layer.
        """
        if not 0 <= boundary_index < len(self.runs) - 1:
            raise LayoutError(
                tr(
                    "there is no boundary {boundary_index}; the number of boundaries is {count} (the first is 0)",
                    boundary_index=boundary_index,
                    count=len(self.runs) - 1,
                ),
                location="runs",
            )
        left, right = self.runs[boundary_index : boundary_index + 2]
        # Clamped at the neighbours, so that a run does not vanish while its boundary is dragged.
        first = min(max(layer, left.first + 1), right.last)
        moved = (replace(left, last=first - 1), replace(right, first=first))
        return replace(self, runs=(*self.runs[:boundary_index], *moved, *self.runs[boundary_index + 2 :]))

    def move_range(self, first: int, last: int, device: str) -> Layout:
        """Return the layout with layers `first` to `last`, both included, on `device`.

        Neighbouring runs (ranges of layers) on one device are merged.
        """
        self._check_layer(first)
        self._check_layer(last)
        if first > last:
            raise LayoutError(tr("layers {first}-{last} are in reverse order", first=first, last=last), location="runs")
        assignment = list(self.assignment())
        assignment[first : last + 1] = [device] * (last - first + 1)
        # Decided by the layout before the move, because afterwards the last layer may be on another device.
        followed = self.output_device == self.runs[-1].device
        return self._edited(_runs_of(assignment), assignment[-1] if followed else self.output_device)

    def assign(self, layer: int, device: str) -> Layout:
        """Return the layout with one layer on `device`; `layer` == `n_layers` is the output layer."""
        return self.move_output(device) if layer == self.n_layers else self.move_range(layer, layer, device)

    def move_output(self, device: str) -> Layout:
        """Return the layout with the output layer on `device`."""
        return self._edited(self.runs, device)

    def replace_device(self, old: str, new: str) -> Layout:
        """Return the layout with device `new` in place of device `old` everywhere.

        If both devices have a share of the tensor split, the shares are added.
        """

        def swap(device: str) -> str:
            return new if device == old else device

        shares: dict[str, float] = {}
        for device, share in self.tensor_split:
            # Both devices may have a share. `_check_shares` allows one for each device.
            shares[swap(device)] = shares.get(swap(device), 0.0) + share
        return replace(
            self,
            runs=_runs_of([swap(device) for device in self.assignment()]),
            output_device=swap(self.output_device),
            tensor_split=tuple(shares.items()),
            main_device=None if self.main_device is None else swap(self.main_device),
            overrides=tuple(replace(override, device=swap(override.device)) for override in self.overrides),
        )

    def with_split_mode(self, mode: SplitMode) -> Layout:
        """Return the layout in another split mode.

        Mode none puts the whole model on the device with most layers. Modes tensor and row split all layers except the
        CPU layers at the front. If there are no shares yet, each device but the CPU gets its number of layers as its
        share.
        """
        if mode == self.split_mode:
            return self
        if mode == "none":
            device = max(self.devices, key=self.assignment().count)
            runs = (Run(device, 0, self.n_layers - 1),)
            return replace(self, runs=runs, output_device=device, split_mode=mode, tensor_split=(), main_device=None)
        if mode == "layer":
            return replace(self, split_mode=mode, tensor_split=(), main_device=None)
        shares = self.tensor_split or self._shares_by_layers()
        return replace(self, split_mode=mode, tensor_split=shares, main_device=None)

    def _shares_by_layers(self) -> tuple[tuple[str, float], ...]:
        members = [device for device in self.devices if device != CPU_ID]
        if not members:
            raise LayoutError(tr("split modes tensor and row need a device other than the CPU"), location="split_mode")
        # A device with the output layer alone gets a share too, because a share of 0 would leave it out.
        return tuple((device, float(max(1, self.assignment().count(device)))) for device in members)

    def _edited(self, runs: tuple[Run, ...], output_device: str) -> Layout:
        spread = len(runs) > 1 or runs[0].device != output_device
        # Mode none is for one device, so a change that needs a second one changes the mode too.
        mode: SplitMode = "layer" if self.split_mode == "none" and spread else self.split_mode
        return replace(self, runs=runs, output_device=output_device, split_mode=mode)

    def _check_layer(self, layer: int) -> None:
        if not 0 <= layer < self.n_layers:
            raise LayoutError(
                tr("there is no layer {layer}; layers are 0-{n_layers}", layer=layer, n_layers=self.n_layers - 1),
                location="runs",
            )


def make_layout(n_layers: int, assignments: Sequence[str], output_device: str | None = None) -> Layout:
    """Return a layout in split mode layer.

    `assignments`: device id of each layer.
    `output_device`: device id of the output layer; None for the device of the last layer.
    """
    if n_layers < 1 or len(assignments) != n_layers:
        raise LayoutError(
            tr(
                "a list of {count} devices was given for {n_layers} layers; each layer needs one device",
                count=len(assignments),
                n_layers=n_layers,
            ),
            location="runs",
        )
    return Layout(n_layers, _runs_of(assignments), output_device or assignments[-1])


def single_device(n_layers: int, device: str) -> Layout:
    """Return a layout with everything on one device, in mode layer."""
    return make_layout(n_layers, [device] * n_layers)


def split_evenly(n_layers: int, devices: Sequence[str]) -> Layout:
    """Return a layout that divides the layers evenly between `devices`, in order; the numbers differ by at most one.

    If there are more devices than layers, the last devices get none.
    """
    if not devices:
        raise LayoutError(tr("no devices were given to split the layers over"), location="runs")
    used = devices[:n_layers]
    # In whole numbers: lengths differ by one layer at most, and no device stays empty.
    return make_layout(n_layers, [used[layer * len(used) // n_layers] for layer in range(n_layers)])


def check_cover(n_layers: int, runs: Sequence[Run]) -> None:
    """Check that `runs` contain each of `n_layers` layers once and in order.

    A run is neighbouring layers on one device. Here the next run may be on the same device.

    Raises:
        LayoutError: a layer is missing, repeated or out of order, or `n_layers` is not between 1 and `MAX_LAYERS`.
    """
    if not 1 <= n_layers <= MAX_LAYERS:
        raise LayoutError(
            tr("a layout must have 1 to {max_layers} layers, not {n_layers}", max_layers=MAX_LAYERS, n_layers=n_layers),
            location="model.layers",
        )
    if not runs:
        raise LayoutError(tr("no layer is assigned to a device; assign every layer to one"), location="runs")
    # `expected` is the layer that the next run has to start with.
    expected = 0
    for index, run in enumerate(runs):
        location = f"runs[{index}].layers"
        if not run.device:
            raise LayoutError(tr("a run needs a device"), location=f"runs[{index}].device")
        if run.last < run.first:
            raise LayoutError(
                tr("layers {first}-{last} are in reverse order", first=run.first, last=run.last), location=location
            )
        if run.first != expected:
            raise LayoutError(_misplaced(run, expected, runs[index - 1] if index else None), location=location)
        expected = run.last + 1
    if expected != n_layers:
        raise LayoutError(
            tr(
                "the runs end at layer {expected}, but the model has layers 0-{n_layers}",
                expected=expected - 1,
                n_layers=n_layers - 1,
            ),
            location=f"runs[{len(runs) - 1}].layers",
        )


def merge_runs(runs: Iterable[Run]) -> tuple[Run, ...]:
    """Return `runs` with neighbouring runs on the same device merged into one."""
    # A tuple at once: `groupby` empties a group when the next one is asked for.
    groups = (tuple(group) for _, group in groupby(runs, key=lambda run: run.device))
    return tuple(Run(group[0].device, group[0].first, group[-1].last) for group in groups)


def _runs_of(assignment: Sequence[str]) -> tuple[Run, ...]:
    return merge_runs(Run(device, layer, layer) for layer, device in enumerate(assignment))


def _misplaced(run: Run, expected: int, before: Run | None) -> str:
    if before is None:
        return tr("the first run starts at layer {first}; the first run must start at layer 0", first=run.first)
    if run.first > expected:
        if run.first - 1 == expected:
            return tr("layer {expected} is on no device; start this run at layer {expected}", expected=expected)
        return tr(
            "layers {expected}-{last} are on no device; start this run at layer {expected}",
            expected=expected,
            last=run.first - 1,
        )
    # A run that lies before its predecessor is in the wrong place; any other overlap has a wrong first layer.
    if run.last < before.first:
        return tr(
            "this run starts at layer {first} and comes after layer {last}; put the runs in layer order",
            first=run.first,
            last=before.last,
        )
    return tr(
        "this run overlaps the run before, which ends at layer {last}; start this run at layer {expected}",
        last=before.last,
        expected=expected,
    )


def _check_split(layout: Layout) -> None:
    mode = layout.split_mode
    if mode not in SPLIT_MODES:
        raise LayoutError(
            tr('"{mode}" is not a split mode; use one of {names}', mode=mode, names=", ".join(SPLIT_MODES)),
            location="split_mode",
        )
    if mode == "none" and layout.devices != (layout.runs[0].device,):
        raise LayoutError(
            tr("split mode none needs everything on one device, not on {names}", names=", ".join(layout.devices)),
            location="split_mode",
        )
    if mode in ("layer", "none") and layout.tensor_split:
        raise LayoutError(
            tr("shares belong to split modes tensor and row, not to split mode {mode}", mode=mode),
            location="tensor_split",
        )
    if mode != "row" and layout.main_device is not None:
        raise LayoutError(
            tr("a main device can be set only in split mode row, not in split mode {mode}", mode=mode),
            location="main_device",
        )
    if mode in ("tensor", "row"):
        _check_shares(layout)


def _check_shares(layout: Layout) -> None:
    shares = layout.tensor_split
    if len({device for device, _ in shares}) != len(shares):
        raise LayoutError(tr("a device has two shares; only one share per device is allowed"), location="tensor_split")
    for device, share in shares:
        if not (math.isfinite(share) and share >= 0):
            raise LayoutError(tr("a share must be a number, 0 or above"), location=f"tensor_split.{device}")
    if not any(share > 0 for _, share in shares):
        raise LayoutError(
            tr("split mode {split_mode} needs at least one share above 0", split_mode=layout.split_mode),
            location="tensor_split",
        )


def _check_override(n_layers: int, override: Override, location: str) -> None:
    if not override.device:
        raise LayoutError(tr("an override needs a device"), location=f"{location}.device")
    if (override.part is None) == (override.pattern is None):
        raise LayoutError(tr("an override needs either a part or a pattern, not both"), location=location)
    if override.pattern is not None:
        fault = find_pattern_error(override.pattern)
        if fault:
            raise LayoutError(fault, location=f"{location}.pattern")
    elif override.part not in OVERRIDE_PARTS:
        raise LayoutError(
            tr("part must be one of {names}", names=", ".join(OVERRIDE_PARTS)), location=f"{location}.part"
        )
    # A pattern names its layers itself.
    if (override.first is None) != (override.last is None) or (override.first is not None and override.pattern):
        raise LayoutError(
            tr("an override of a range of layers needs a part, the first layer and the last layer"),
            location=f"{location}.layers",
        )
    if override.layers is not None and not 0 <= override.layers.start < override.layers.stop <= n_layers:
        raise LayoutError(
            tr(
                "layers {first}-{last} are not a valid range within 0-{n_layers}",
                first=override.first,
                last=override.last,
                n_layers=n_layers - 1,
            ),
            location=f"{location}.layers",
        )

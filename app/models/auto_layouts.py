"""Automatic layouts in the window: their options, pinned layers, and the search."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TypeVar

from msgspec import Struct
from PySide6.QtCore import QObject, Signal

from app.background import Background, Task
from app.models.document import LayoutDocument
from app.models.speeds import SpeedRepository
from app.notices import Notices
from app.rig.live_rig import LiveRig
from app.settings import MAX_RECENT, Settings
from engine.base.errors import EngineError, LayoutError
from engine.base.language import tr
from engine.base.values import replace
from engine.devices.device import Rig
from engine.model.gguf.model_file import ModelFile
from engine.planning.fit.strategies.constraints import AutoLayout, Constraints, SearchLimit, check_constraints
from engine.planning.layout.layout import Layout
from engine.planning.layout.parts import MOVABLE_PARTS, MovablePart, PartPin, Pin, part_device
from engine.planning.memory.side_files import SideFiles
from engine.planning.plan.edit import Edit
from engine.planning.settings.context_settings import ContextSettings
from widgets.controls.values import AutoOptions, StrategyText
from widgets.layout_editor.placement import Pins, PinToggle

STRATEGY_TEXTS = (
    StrategyText("fewest", tr("&Fewest Devices"), tr("Use as few devices as possible")),
    StrategyText(
        "priority",
        tr("One Device &after Another"),
        tr("Fill the first device before the next, in the chosen order"),
        uses_order=True,
    ),
    StrategyText("balanced", tr("&Balanced"), tr("Leave the same amount of memory free on every device")),
    StrategyText("proportional", tr("Pr&oportional"), tr("Give each device layers in proportion to its free memory")),
    StrategyText(
        "experts", tr("E&xperts Last"), tr("Place dense weights on the devices first, then as many experts as fit")
    ),
    StrategyText("context", tr("Longest &Context"), tr("Find the longest context that fits"), uses_kv_types=True),
    StrategyText("fastest", tr("Fas&test"), tr("Find the layout with the highest predicted tokens/s")),
)
"""Name, menu title with mnemonic, and purpose of each strategy that finds a layout."""

_Value = TypeVar("_Value")
Find = Callable[[ModelFile, Rig, ContextSettings, SideFiles], Edit]
"""Type of a function that finds a layout and context settings for a model on a rig; see `AutoLayouts.finder`."""


class StoredPins(Struct, frozen=True):
    """Stored pins of all models: layers that automatic layouts must leave on a device.

    The keys of each field are paths of model files.
    `layers`: tuples of (device, first layer, last layer). `outputs`: device of the output layer.
    `parts`: tuples of (device, part of a layer, first layer, last layer).
    """

    layers: dict[str, tuple[tuple[str, int, int], ...]] = {}
    outputs: dict[str, str] = {}
    parts: dict[str, tuple[tuple[str, MovablePart, int, int], ...]] = {}


class AutoLayouts(QObject):
    """Finds automatic layouts in the background, and stores their options and pins. A found layout is one step of undo.

    `searching`: emitted with the progress of the search as text; empty when no search runs.
    """

    options_changed = Signal(AutoOptions)
    pins_changed = Signal(Pins)
    found = Signal(AutoLayout)
    projectors_counted = Signal(bool)
    searching = Signal(str)

    def __init__(
        self,
        document: LayoutDocument,
        live: LiveRig,
        background: Background,
        settings: Settings,
        speeds: SpeedRepository,
        notices: Notices,
        parent: QObject | None = None,
    ) -> None:
        super().__init__(parent)
        self._document = document
        self._live = live
        self._finding = background.latest()
        self._settings = settings
        self._speeds = speeds
        self._notices = notices
        self.options = _options(settings.kept("auto_layout", AutoOptions) or AutoOptions())
        self._pins = settings.kept("pins", StoredPins) or StoredPins()

    @property
    def pins(self) -> Pins:
        """The pins of the current model: layers that automatic layouts leave on their device."""
        return self._pins_of(self._path)

    def _pins_of(self, path: str) -> Pins:
        return _pins(self._pins, path)

    @property
    def _path(self) -> str:
        model = self._document.model
        return "" if model is None else str(model.paths[0])

    def set_options(self, options: AutoOptions) -> None:
        """Set the options of automatic layouts (strategy, devices, cache types), and store them."""
        before, self.options = self.options, options
        self._settings.keep_changes("auto_layout", before, options)
        self.options_changed.emit(options)

    @property
    def counts_projectors(self) -> bool:
        """Whether memory forecasts of models that are not open include the projector that belongs to the model."""
        return self._settings.counts_projectors

    def count_projectors(self, wanted: bool) -> None:
        """Set and store whether forecasts of models that are not open include the projector."""
        self._settings.counts_projectors = wanted
        self.projectors_counted.emit(wanted)

    # ------------------------------------------------------------------ pins

    def toggle_pin(self, toggle: PinToggle) -> None:
        """Pin the layers, layer parts or output layer of `toggle` to their present devices.

        If all are pinned to these devices already, the pins are removed.
        """
        edit = self._document.edit
        if edit is None:
            return
        pins, layout = self.pins, edit.layout
        if toggle.layers is not None and toggle.part is not None:
            self._set_pins(replace(pins, parts=_toggled_parts(pins, layout, toggle.part, *toggle.layers)))
        elif toggle.layers is None:
            output = None if pins.output == layout.output_device else layout.output_device
            self._set_pins(replace(pins, output=output))
        else:
            self._set_pins(replace(pins, layers=_toggled(pins, layout, *toggle.layers)))

    def release_pins(self) -> None:
        """Remove all pins of the current model."""
        self._set_pins(Pins())

    def show_pins(self) -> None:
        """Emit `pins_changed` with the pins of the current model."""
        self.pins_changed.emit(self.pins)

    def _set_pins(self, pins: Pins) -> None:
        path = self._path
        # Another window may have changed the pins of other models.
        self._settings.sync()
        self._pins = self._settings.kept("pins", StoredPins) or StoredPins()
        # Removed and added at the end: `_latest` keeps the last ones.
        layers = {key: value for key, value in self._pins.layers.items() if key != path}
        outputs = {key: value for key, value in self._pins.outputs.items() if key != path}
        if pins.layers:
            layers[path] = tuple((pin.device, pin.first, pin.last) for pin in pins.layers)
        if pins.output is not None:
            outputs[path] = pins.output
        parts = {key: value for key, value in self._pins.parts.items() if key != path}
        if pins.parts:
            parts[path] = tuple((pin.device, pin.part, pin.first, pin.last) for pin in pins.parts)
        self._pins = StoredPins(_latest(layers), _latest(outputs), _latest(parts))
        self._settings.keep("pins", self._pins)
        self.pins_changed.emit(self.pins)

    # ------------------------------------------------------------------ finding

    def use(self, strategy: str) -> None:
        """Find a layout for the current devices by `strategy` in the background, and make it the edited layout."""
        model, asked, rig = self._document.model, self._document.edit, self._live.rig
        if model is None or asked is None:
            return
        constraints = replace(self.constraints(model), side_files=asked.side_files)
        speeds_of = self._speeds.known_speeds

        def find(task: Task[int]) -> AutoLayout:
            # Imported here: the strategies take time to import, and the window opens without them.
            from engine.planning.fit.strategies.catalogue import auto_layout

            check_constraints(constraints, rig, model.n_layers)
            wanted = replace(constraints, speeds=speeds_of(rig), watch=SearchLimit(task.token, task.report))
            return auto_layout(strategy, model, rig, asked.context, wanted)

        def apply(found: AutoLayout) -> None:
            self.searching.emit("")
            obstacle = self._obstacle(model, asked, rig)
            if obstacle:
                self._notices.show_error(
                    LayoutError(
                        tr(
                            "The layout found by {strategy} was not used: {obstacle}",
                            strategy=strategy,
                            obstacle=obstacle,
                        )
                    )
                )
                return
            self._document.set_edit(found.layout, found.context, tr("auto layout {strategy}", strategy=strategy))
            self.found.emit(found)
            self._notices.show(found.explanation, bad=not found.fits)

        def refuse(error: EngineError) -> None:
            self.searching.emit("")
            self._notices.show_error(error)

        def show_progress(n_tried: int) -> None:
            self.searching.emit(tr("Finding a layout; layouts tried: {n_tried}", n_tried=n_tried))

        self.searching.emit(tr("Finding a layout"))
        self._finding.run("Finding a layout", find, apply, refuse, show_progress, quiet=True)

    def finder(self) -> Find:
        """Return a function that finds a layout with the preferred strategy and the present options and pins.

        The function blocks, and may be called in any thread. It raises `EngineError`.
        """
        # Values from now, in the GUI thread: `find` runs in another thread, while these attributes may change.
        options, pins_of, speeds_of = self.options, partial(_pins, self._pins), self._speeds.known_speeds

        def find(model: ModelFile, rig: Rig, context: ContextSettings, side_files: SideFiles) -> Edit:
            from engine.planning.fit.strategies.catalogue import auto_layout

            constraints = _constraints(model, set(rig.ids), options, pins_of(str(model.paths[0])))
            wanted = replace(constraints, side_files=side_files, speeds=speeds_of(rig))
            found = auto_layout(options.strategy, model, rig, context, wanted)
            return Edit(found.layout, found.context, side_files)

        return find

    def cancel(self) -> None:
        """Cancel a running search. The layout is not changed."""
        if self._finding.is_running:
            self._finding.cancel()
            self.searching.emit("")

    def _obstacle(self, model: ModelFile, asked: Edit, rig: Rig) -> str:
        """Return why a layout that a search has found can no longer be used, as a text for people; empty if it can.

        Reasons are changed settings, other devices and another current model. Layers that were moved and free memory
        that changed during the search are no reasons.
        `model`, `asked`, `rig`: the model, its layout and settings, and the devices, when the search was started.
        """
        edit = self._document.edit
        if edit is None or self._document.model is not model:
            return tr(
                "the layout was made for {name}, but another model is shown. Switch to {name} and search again.",
                name=model.name,
            )
        if replace(edit, layout=asked.layout) != asked:
            return tr("the settings changed during the search. Search again.")
        if self._live.rig.ids != rig.ids:
            return tr("the devices changed during the search. Search again.")
        return ""

    def constraints(self, model: ModelFile) -> Constraints:
        """Return the options and pins for the search for a layout of `model`.

        Options and pins of devices or layers that do not exist are left out.
        """
        return _constraints(model, set(self._live.rig.ids), self.options, self._pins_of(str(model.paths[0])))


def _constraints(model: ModelFile, ids: set[str], options: AutoOptions, pins: Pins) -> Constraints:
    return Constraints(
        order=tuple(device_id for device_id in options.order if device_id in ids),
        off=options.off & ids,
        pins=tuple(pin for pin in pins.layers if pin.device in ids and pin.last < model.n_layers),
        output=pins.output if pins.output in ids else None,
        split=options.split,
        one_backend=options.one_backend,
        kv_types=options.kv_types,
        parts=tuple(pin for pin in pins.parts if pin.device in ids and pin.last < model.n_layers),
    )


def _pins(kept: StoredPins, path: str) -> Pins:
    layers = (Pin(*pin) for pin in kept.layers.get(path, ()))
    parts = (PartPin(*pin) for pin in kept.parts.get(path, ()))
    return Pins(tuple(layers), kept.outputs.get(path), tuple(parts))


def _options(kept: AutoOptions) -> AutoOptions:
    """Return the stored options; a strategy that this version of the program lacks is replaced by "fewest"."""
    names = {words.name for words in STRATEGY_TEXTS}
    return kept if kept.strategy in names else replace(kept, strategy="fewest")


def _toggled(pins: Pins, layout: Layout, first: int, last: int) -> tuple[Pin, ...]:
    """Pin layers `first` to `last` to their devices in `layout`, and return all pins of layers.

    If all these layers are pinned to these devices already, their pins are removed instead.
    """
    assigned = dict(enumerate(layout.assignment()))
    held = {index: device for index in assigned if (device := pins.device_of(index)) is not None}
    devices = {index: assigned[index] for index in range(first, last + 1)}
    return tuple(Pin(*each) for each in _ranges(_toggled_devices(held, devices)))


def _toggled_parts(pins: Pins, layout: Layout, part: MovablePart, first: int, last: int) -> tuple[PartPin, ...]:
    """Pin a part (such as the experts) of the layers `first` to `last` where `layout` places it.

    Return all pins of layer parts. If the part is pinned to these devices in all these layers already, its pins are
    removed instead.
    """
    name = MOVABLE_PARTS[part][0]
    held = {
        layer: device for layer in range(layout.n_layers) if (device := pins.part_device_of(part, layer)) is not None
    }
    devices = {layer: part_device(layout, name, layer) for layer in range(first, last + 1)}
    toggled = _ranges(_toggled_devices(held, devices))
    return (
        *(pin for pin in pins.parts if pin.part != part),
        *(PartPin(device, part, begin, end) for device, begin, end in toggled),
    )


def _toggled_devices(held: dict[int, str], devices: dict[int, str]) -> dict[int, str]:
    """Pin or unpin the layers in `devices`. Return the device of each layer that is pinned after that.

    If all layers of `devices` are pinned to their present devices, they are unpinned. Otherwise all of them are pinned
    to these devices, also layers that were pinned to another device.

    `held`: device of each layer that was pinned before the call. `devices`: present device of each layer to change.
    """
    if all(held.get(layer) == device for layer, device in devices.items()):
        return {layer: device for layer, device in held.items() if layer not in devices}
    return held | devices


def _ranges(held: dict[int, str]) -> list[tuple[str, int, int]]:
    """Join neighbouring layers on the same device to ranges; return (device, first layer, last layer) of each range.

    `held`: device by layer.
    """
    ranges: list[tuple[str, int, int]] = []
    for layer in sorted(held):
        if ranges and ranges[-1][0] == held[layer] and ranges[-1][2] == layer - 1:
            ranges[-1] = held[layer], ranges[-1][1], layer
        else:
            ranges.append((held[layer], layer, layer))
    return ranges


def _latest(kept: dict[str, _Value]) -> dict[str, _Value]:
    return dict(list(kept.items())[-MAX_RECENT:])

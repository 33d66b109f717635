"""The state of mouse and keyboard in the editor: focus, selection and drag, in scene coordinates."""

from __future__ import annotations

from PySide6.QtCore import QObject, Signal

from engine.planning.layout.moves import BoundaryMove, DraftMove, EmbeddingMove, Move, OutputMove, PartMove, RangeMove
from engine.planning.layout.parts import MOVABLE_PARTS, MovablePart, embedding_device, part_device
from widgets.layout_editor.drag import BoundaryDrag, Drag, LaneDrag, LaneMove, SelectDrag, boundary_limits
from widgets.layout_editor.keyboard import (
    BoundaryFocus,
    Command,
    DraftFocus,
    EmbeddingFocus,
    Focus,
    LayerFocus,
    OutputFocus,
    Selection,
    kept_focus,
    next_layer,
    next_stop,
    run_of,
)
from widgets.layout_editor.placement import PinToggle
from widgets.layout_editor.preview_geometry import (
    BarTarget,
    DraftTarget,
    EmbeddingTarget,
    EmptyTarget,
    HandleTarget,
    LayerTarget,
    OutputTarget,
    PartTarget,
    PreviewGeometry,
    Target,
)


class Interaction(QObject):
    """Converts mouse presses, pointer positions and keyboard commands to moves of the layout.

    A drag emits moves, all relative to the layout at its start, then `move_finished` or `move_cancelled`, even if it
    moved nothing. A keyboard command that moves something emits one move and `move_finished`. After each call the
    caller must repaint the highlights of `focus`, `drag` and `hover`.
    """

    moved = Signal(Move)
    move_finished = Signal()
    move_cancelled = Signal()
    pin_toggled = Signal(PinToggle)
    selection_changed = Signal(Selection)
    folds_toggled = Signal(tuple)
    """Requests to fold or unfold machines. The argument has their keys (`MachineGroup.key`)."""

    def __init__(self, drag_distance: int, parent: QObject | None = None) -> None:
        super().__init__(parent)
        self._threshold = float(drag_distance)
        self._geometry: PreviewGeometry | None = None
        self.focus: Focus | None = None
        self.drag: Drag | None = None
        self.hover: Target | None = None
        self._focus_before: Focus | None = None
        self._clicked: LayerFocus | None = None

    @property
    def selection(self) -> Selection:
        """The selected layers."""
        return Selection(self.focus.span if isinstance(self.focus, LayerFocus) else None)

    def set_geometry(self, geometry: PreviewGeometry | None, *, keeps_drag: bool) -> None:
        """Set the preview that the view shows; None if it shows none.

        `keeps_drag`: whether drag, focus and selection continue. They cannot if the model or the devices have changed.
        """
        before, self._geometry = self._geometry, geometry
        if geometry is None or not keeps_drag:
            self.end_drag()
            self.hover = None
            self.set_focus(None)
        else:
            focus = kept_focus(geometry.preview.layout, self.focus)
            is_hidden = _has_no_handle(geometry, focus) or (
                isinstance(focus, DraftFocus) and geometry.draft_lane is None
            )
            self.set_focus(None if is_hidden else focus)
            if isinstance(self.drag, LaneDrag) and before is not None:
                _follow_lanes(self.drag, before, geometry)

    def set_focus(self, focus: Focus | None) -> None:
        """Set the keyboard focus. Layers that get the focus become the selection; any other focus clears it."""
        if focus == self.focus:
            return
        before = self.selection
        self.focus = focus
        if self.selection != before:
            self.selection_changed.emit(self.selection)

    # The mouse

    def press(self, x: float, y: float, *, extend: bool, apart: bool = False) -> None:
        """Start a drag or set the focus, for a press of the left button at a point.

        `extend`: extend the selection to the pressed layer.
        `apart`: drag the attention and dense part of a layer without the rest of the layer.
        """
        geometry = self._geometry
        if geometry is None:
            return
        self._focus_before, self._clicked = self.focus, None
        layout = geometry.preview.layout
        match geometry.target_at(x, y):
            case HandleTarget(index):
                # The drag keeps this layout: the previews that answer its moves do not change what the moves refer to.
                self.drag = BoundaryDrag(layout, index, x - geometry.track.edges[layout.runs[index + 1].first])
                self.set_focus(BoundaryFocus(index))
            case OutputTarget():
                lane = geometry.lane_of[layout.output_device]
                drops = geometry.drop_devices(lane, layout.output_device)
                self.drag = LaneDrag(None, lane, (x, y), drops, self._threshold)
                self.set_focus(OutputFocus())
            case EmbeddingTarget():
                drops = geometry.drop_devices(geometry.embedding_lane, embedding_device(layout))
                drag = LaneDrag(None, geometry.embedding_lane, (x, y), drops, self._threshold)
                drag.part = "embedding"
                self.drag = drag
                self.set_focus(EmbeddingFocus())
            case DraftTarget(lane):
                draft = geometry.preview.draft
                home = None if draft is None or len(draft.devices) > 1 else draft.devices[0]
                drag = LaneDrag(None, lane, (x, y), geometry.drop_devices(lane, home), self._threshold)
                drag.part = "draft"
                self.drag = drag
                self.set_focus(DraftFocus())
            case LayerTarget(layer, lane) if apart and not extend:
                self._press_part(geometry, PartTarget(layer, lane, "dense"), (x, y), extend=extend)
            case PartTarget() as target:
                self._press_part(geometry, target, (x, y), extend=extend)
            case LayerTarget(layer, lane):
                self._press_layer(geometry, layer, lane, (x, y), extend=extend)
            case EmptyTarget():
                if not extend:
                    self.set_focus(None)
                self.drag = SelectDrag(geometry.track.layer_at(x), (x, y), self._threshold)
            case BarTarget(lane) if (group := geometry.contents[lane].group) is not None:
                self.folds_toggled.emit((group.key,))
            case _:
                self.set_focus(None)

    def _press_layer(
        self, geometry: PreviewGeometry, layer: int, lane: int, at: tuple[float, float], *, extend: bool
    ) -> None:
        # Shift or Ctrl only extends the selection; a drag that began here would move a range that is still being
        # chosen.
        if extend and isinstance(self.focus, LayerFocus):
            self.set_focus(LayerFocus(layer, self.focus.anchor))
            return
        if self.selection.contains(layer) and self.selection.layers is not None:
            span = self.selection.layers
        else:
            # Without a selection a drag takes the whole run: a single layer moved away would cut the run in two.
            run = geometry.run_at(layer)
            span = (run.first, run.last)
            self.set_focus(LayerFocus(layer, layer))
        # A click selects the layer on release only: until then the press may begin a drag of the selection.
        self._clicked = LayerFocus(layer, layer)
        self.drag = LaneDrag(
            span, lane, at, geometry.drop_devices(lane, geometry.run_at(layer).device), self._threshold
        )

    def _press_part(
        self, geometry: PreviewGeometry, target: PartTarget, at: tuple[float, float], *, extend: bool
    ) -> None:
        layer = target.layer
        if extend and isinstance(self.focus, LayerFocus):
            self.set_focus(LayerFocus(layer, self.focus.anchor))
            return
        span = (layer, layer)
        if self.selection.contains(layer) and self.selection.layers is not None:
            span = self.selection.layers
        else:
            # A part of one layer does not cut a run in two, so without a selection the layer's own part is taken.
            self.set_focus(LayerFocus(layer, layer))
        self._clicked = LayerFocus(layer, layer)
        home = part_device(geometry.preview.layout, MOVABLE_PARTS[target.part][0], layer)
        drag = LaneDrag(span, target.lane, at, geometry.drop_devices(target.lane, home), self._threshold)
        drag.part = target.part
        self.drag = drag

    def pointer_moved(self, x: float, y: float) -> None:
        """Continue the drag to this point; if there is no drag, set `hover` to the part at this point."""
        geometry = self._geometry
        if geometry is None:
            return
        drag = self.drag
        if drag is None:
            self.hover = geometry.target_at(x, y)
        elif isinstance(drag, BoundaryDrag):
            self._send(drag.move_to(x, geometry.track))
        elif isinstance(drag, LaneDrag):
            self._drag_lane(drag, drag.move_to(x, y, geometry.lanes))
        else:
            span = drag.span_to(x, geometry.track)
            if span is not None:
                # The focus is the end at the pointer, so that Shift and the arrow keys go on from there.
                self.set_focus(LayerFocus(span[1] if drag.anchor == span[0] else span[0], drag.anchor))

    def _drag_lane(self, drag: LaneDrag, move: LaneMove | None) -> None:
        if drag.begun and drag.span is not None:
            self._clicked = None
            first, last = drag.span
            self.set_focus(LayerFocus(last, first))
        self._send(move)

    def release(self) -> None:
        """End the drag and emit `move_finished`. Nothing happens if there is no drag."""
        # Cleared before the signal: its listener answers with a new preview, in which nothing is dragged any more.
        drag, self.drag = self.drag, None
        if drag is None:
            return
        if self._clicked is not None:
            self.set_focus(self._clicked)
        self.move_finished.emit()

    def cancel_drag(self) -> bool:
        """End the drag, emit `move_cancelled`, and restore the focus from before the drag.

        Return whether there was a drag.
        """
        if self.drag is None:
            return False
        self.end_drag()
        self.set_focus(self._focus_before)
        self.move_cancelled.emit()
        return True

    def end_drag(self) -> None:
        """End the drag without emitting a signal. Used when the layout at its start no longer exists."""
        self.drag = self._clicked = None

    def _send(self, move: Move | None) -> None:
        if move is not None:
            self.moved.emit(move)

    # The context menu

    def focus_at(self, x: float, y: float) -> bool:
        """Set the focus to the layer, output, embedding or draft model at a point, for a context menu there.

        A click on a selected layer does not change the selection. Return False if there is nothing to focus at the
        point, or during a drag.
        """
        geometry = self._geometry
        if geometry is None or self.drag is not None:
            return False
        match geometry.target_at(x, y):
            case LayerTarget(layer, _) | PartTarget(layer, _, _):
                if not self.selection.contains(layer):
                    self.set_focus(LayerFocus(layer, layer))
            case OutputTarget():
                self.set_focus(OutputFocus())
            case EmbeddingTarget():
                self.set_focus(EmbeddingFocus())
            case DraftTarget():
                self.set_focus(DraftFocus())
            case _:
                return False
        return True

    def destinations(self) -> tuple[str, ...]:
        """Return the ids of the devices to which the focused layers, output, embedding or draft can be moved."""
        geometry, focus = self._geometry, self.focus
        if geometry is None or not isinstance(focus, LayerFocus | OutputFocus | EmbeddingFocus | DraftFocus):
            return ()
        layout = geometry.preview.layout
        if isinstance(focus, OutputFocus):
            here = {layout.output_device}
        elif isinstance(focus, EmbeddingFocus):
            here = {embedding_device(layout)}
        elif isinstance(focus, DraftFocus):
            here = set() if geometry.preview.draft is None else set(geometry.preview.draft.devices)
        else:
            first, last = focus.span
            here = {layout.device_of(layer) for layer in range(first, last + 1)}
        # A selection over several devices can also be moved to one of these.
        return tuple(device for device in geometry.destinations() if here != {device})

    def move_to(self, device: str) -> None:
        """Emit one move of the focused layers, output, embedding or draft to a device, and then `move_finished`."""
        move = _move_of(self.focus, device)
        if move is not None:
            self._send(move)
            self.move_finished.emit()

    def part_destinations(self, part: MovablePart) -> tuple[str, ...]:
        """Return the ids of the devices to which a part of the focused layers can be moved.

        The result is empty if the layers lack the part.
        """
        geometry, focus = self._geometry, self.focus
        if geometry is None or not isinstance(focus, LayerFocus) or not geometry.has_part(part, *focus.span):
            return ()
        layout, (first, last) = geometry.preview.layout, focus.span
        here = {part_device(layout, name, layer) for name in MOVABLE_PARTS[part] for layer in range(first, last + 1)}
        return tuple(device for device in geometry.destinations() if here != {device})

    def move_part_to(self, part: MovablePart, device: str) -> None:
        """Emit one move of a part of the focused layers to a device, and then `move_finished`."""
        if isinstance(self.focus, LayerFocus):
            self._send(PartMove(part, *self.focus.span, device))
            self.move_finished.emit()

    # The keyboard

    def step_stop(self, step: int) -> bool:
        """Move the focus to the next (`step` 1) or previous (-1) Tab stop; return False if there is none."""
        if self._geometry is None or self.drag is not None:
            return False
        preview = self._geometry.preview
        moves, draft = preview.embedding_moves, preview.draft is not None
        stop = next_stop(preview.layout, self.focus, step, embedding=moves, draft=draft)
        # In modes tensor and row the runs have no boundaries that could be moved.
        while _has_no_handle(self._geometry, stop):
            stop = next_stop(preview.layout, stop, step, embedding=moves, draft=draft)
        if stop is not None:
            self.set_focus(stop)
        return stop is not None

    def wants(self, command: Command) -> bool:
        """Return whether `command` would have an effect now."""
        if command is Command.CLEAR:
            return self.drag is not None or self.focus is not None
        if command in (Command.FOLD, Command.FOLD_ALL):
            return self.drag is None and bool(self._folds(command))
        if command is Command.PIN:
            return self.drag is None and isinstance(self.focus, LayerFocus | OutputFocus)
        if command in (Command.PIN_EXPERTS, Command.EXPERTS_UP, Command.EXPERTS_DOWN):
            geometry, focus = self._geometry, self.focus
            if geometry is None or self.drag is not None or not isinstance(focus, LayerFocus):
                return False
            return geometry.has_part("experts", *focus.span)
        return self._geometry is not None and self.drag is None

    def perform(self, command: Command) -> None:
        """Carry out a keyboard command."""
        geometry = self._geometry
        if command is Command.CLEAR:
            if not self.cancel_drag():
                self.set_focus(None)
            return
        if geometry is None or self.drag is not None:
            return
        layout = geometry.preview.layout
        match command:
            case Command.PREVIOUS_LAYER | Command.NEXT_LAYER | Command.EXTEND_LEFT | Command.EXTEND_RIGHT:
                step = -1 if command in (Command.PREVIOUS_LAYER, Command.EXTEND_LEFT) else 1
                extend = command in (Command.EXTEND_LEFT, Command.EXTEND_RIGHT)
                self.set_focus(next_layer(layout, self.focus, step, extend=extend))
            case Command.FIRST_LAYER | Command.LAST_LAYER:
                layer = 0 if command is Command.FIRST_LAYER else layout.n_layers - 1
                self.set_focus(LayerFocus(layer, layer))
            case Command.SELECT_RUN:
                if isinstance(self.focus, LayerFocus):
                    run = layout.runs[run_of(layout, self.focus.layer)]
                    self.set_focus(LayerFocus(run.last, run.first))
            case Command.BOUNDARY_LEFT | Command.BOUNDARY_RIGHT:
                self._step_boundary(geometry, -1 if command is Command.BOUNDARY_LEFT else 1)
            case Command.PIN | Command.PIN_EXPERTS if self.wants(command):
                part: MovablePart | None = "experts" if command is Command.PIN_EXPERTS else None
                self.pin_toggled.emit(PinToggle(self.selection.layers, part))
            case Command.EXPERTS_UP | Command.EXPERTS_DOWN if self.wants(command):
                self._step_experts(geometry, -1 if command is Command.EXPERTS_UP else 1)
            case Command.FOLD | Command.FOLD_ALL if self.wants(command):
                self.folds_toggled.emit(self._folds(command))
            case Command.LANE_UP | Command.LANE_DOWN:
                self._step_lane(geometry, -1 if command is Command.LANE_UP else 1)

    def _folds(self, command: Command) -> tuple[str, ...]:
        """Return the keys (`MachineGroup.key`) of the machines whose lanes the command folds or unfolds.

        A folded machine has one lane for all its devices. For `FOLD` this is the machine of the focused part. For
        `FOLD_ALL` these are all unfolded machines; if there are none, all machines.
        """
        geometry, focus = self._geometry, self.focus
        if geometry is None:
            return ()
        if command is Command.FOLD_ALL:
            groups = [content.group for content in geometry.contents if content.group is not None]
            unfolded = [group.key for group in groups if not group.is_folded]
            return tuple(unfolded or (group.key for group in groups))
        layout = geometry.preview.layout
        match focus:
            case LayerFocus(layer):
                device = layout.device_of(layer)
            case BoundaryFocus(index):
                device = layout.runs[index + 1].device
            case OutputFocus():
                device = layout.output_device
            case EmbeddingFocus():
                device = embedding_device(layout)
            case DraftFocus() if geometry.preview.draft is not None:
                device = geometry.preview.draft.devices[0]
            case _:
                return ()
        group = geometry.group_of(device)
        return () if group is None else (group.key,)

    def _step_boundary(self, geometry: PreviewGeometry, step: int) -> None:
        if isinstance(self.focus, BoundaryFocus):
            index, layout = self.focus.index, geometry.preview.layout
            low, high = boundary_limits(layout, index)
            layer = layout.runs[index + 1].first + step
            if low <= layer <= high:
                self._send(BoundaryMove(index, layer))
                self.move_finished.emit()

    def _step_experts(self, geometry: PreviewGeometry, step: int) -> None:
        if isinstance(self.focus, LayerFocus):
            device = _next_device(geometry, geometry.part_lane("experts", self.focus.layer), step)
            if device is not None:
                self.move_part_to("experts", device)

    def _step_lane(self, geometry: PreviewGeometry, step: int) -> None:
        focus = self.focus
        if isinstance(focus, LayerFocus):
            lane = geometry.lane_of_layer(focus.layer)
        elif isinstance(focus, OutputFocus):
            lane = geometry.lane_of[geometry.preview.layout.output_device]
        elif isinstance(focus, EmbeddingFocus):
            lane = geometry.embedding_lane
        elif isinstance(focus, DraftFocus) and geometry.draft_lane is not None:
            lane = geometry.draft_lane
        else:
            return
        device = _next_device(geometry, lane, step)
        if device is not None:
            self.move_to(device)


def _follow_lanes(drag: LaneDrag, before: PreviewGeometry, geometry: PreviewGeometry) -> None:
    """Adapt `drag` to the lanes (rows, one for each device) of a new preview so that the drag continues.

    The drag itself can remove lanes. If it takes the last layer from a device that the rig lacks, the lane of that
    device disappears. If few lanes are left, the head lanes (one for each machine) disappear too.
    """
    names, others = ([content.device.id for content in each.contents] for each in (before, geometry))
    if names != others:
        home = drag.devices[drag.lane]
        lane = geometry.lane_of.get(home or names[drag.lane], drag.lane)
        drag.lane = min(lane, len(others) - 1)
        drag.devices = geometry.drop_devices(drag.lane, home)


def _has_no_handle(geometry: PreviewGeometry, focus: Focus | None) -> bool:
    return isinstance(focus, BoundaryFocus) and focus.index >= len(geometry.handles)


def _next_device(geometry: PreviewGeometry, lane: int, step: int) -> str | None:
    """Return the nearest device above (`step` -1) or below (1) `lane` that accepts layers; None if none does."""
    devices = geometry.drop_devices()
    lane += step
    # Lanes of devices that the rig does not have are passed over; they show only where a layout wants them.
    while 0 <= lane < len(devices) and devices[lane] is None:
        lane += step
    return devices[lane] if 0 <= lane < len(devices) else None


def _move_of(focus: Focus | None, device: str) -> Move | None:
    match focus:
        case LayerFocus():
            return RangeMove(*focus.span, device)
        case OutputFocus():
            return OutputMove(device)
        case EmbeddingFocus():
            return EmbeddingMove(device)
        case DraftFocus():
            return DraftMove(device)
    return None

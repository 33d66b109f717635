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
from widgets.layout_editor.shown import (
    BarTarget,
    DraftTarget,
    EmbeddingTarget,
    EmptyTarget,
    HandleTarget,
    LayerTarget,
    OutputTarget,
    PartTarget,
    Shown,
    Target,
)


class Interaction(QObject):
    """Converts mouse presses, pointer positions and keyboard commands to moves of the layout.

    A drag emits moves, all relative to the layout at its start, then `move_finished` or `move_cancelled`, even if it
    moved nothing. A keyboard command that moves something emits one move and `move_finished`. After each call the
    caller must repaint the marks of `focus`, `drag` and `hover`.
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
        self._shown: Shown | None = None
        self.focus: Focus | None = None
        self.drag: Drag | None = None
        self.hover: Target | None = None
        self._focus_before: Focus | None = None
        self._clicked: LayerFocus | None = None

    @property
    def selection(self) -> Selection:
        """The selected layers."""
        return Selection(self.focus.span if isinstance(self.focus, LayerFocus) else None)

    def set_shown(self, shown: Shown | None, *, keeps_drag: bool) -> None:
        """Set the preview that the view shows; None if it shows none.

        `keeps_drag`: whether drag, focus and selection continue. They cannot if the model or the devices have changed.
        """
        before, self._shown = self._shown, shown
        if shown is None or not keeps_drag:
            self.end_drag()
            self.hover = None
            self.set_focus(None)
        else:
            focus = kept_focus(shown.preview.layout, self.focus)
            gone = _has_no_handle(shown, focus) or (isinstance(focus, DraftFocus) and shown.draft_lane is None)
            self.set_focus(None if gone else focus)
            if isinstance(self.drag, LaneDrag) and before is not None:
                _follow_lanes(self.drag, before, shown)

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
        shown = self._shown
        if shown is None:
            return
        self._focus_before, self._clicked = self.focus, None
        layout = shown.preview.layout
        match shown.target_at(x, y):
            case HandleTarget(index):
                # The drag keeps this layout: the previews that answer its moves do not change what the moves refer to.
                self.drag = BoundaryDrag(layout, index, x - shown.track.edges[layout.runs[index + 1].first])
                self.set_focus(BoundaryFocus(index))
            case OutputTarget():
                lane = shown.lane_of[layout.output_device]
                drops = shown.drop_devices(lane, layout.output_device)
                self.drag = LaneDrag(None, lane, (x, y), drops, self._threshold)
                self.set_focus(OutputFocus())
            case EmbeddingTarget():
                drops = shown.drop_devices(shown.embedding_lane, embedding_device(layout))
                drag = LaneDrag(None, shown.embedding_lane, (x, y), drops, self._threshold)
                drag.part = "embedding"
                self.drag = drag
                self.set_focus(EmbeddingFocus())
            case DraftTarget(lane):
                draft = shown.preview.draft
                home = None if draft is None or len(draft.devices) > 1 else draft.devices[0]
                drag = LaneDrag(None, lane, (x, y), shown.drop_devices(lane, home), self._threshold)
                drag.part = "draft"
                self.drag = drag
                self.set_focus(DraftFocus())
            case LayerTarget(layer, lane) if apart and not extend:
                self._press_part(shown, PartTarget(layer, lane, "dense"), (x, y), extend=extend)
            case PartTarget() as target:
                self._press_part(shown, target, (x, y), extend=extend)
            case LayerTarget(layer, lane):
                self._press_layer(shown, layer, lane, (x, y), extend=extend)
            case EmptyTarget():
                if not extend:
                    self.set_focus(None)
                self.drag = SelectDrag(shown.track.layer_at(x), (x, y), self._threshold)
            case BarTarget(lane) if (group := shown.contents[lane].group) is not None:
                self.folds_toggled.emit((group.key,))
            case _:
                self.set_focus(None)

    def _press_layer(self, shown: Shown, layer: int, lane: int, at: tuple[float, float], *, extend: bool) -> None:
        # Shift or Ctrl only extends the selection; a drag that began here would move a range that is still being
        # chosen.
        if extend and isinstance(self.focus, LayerFocus):
            self.set_focus(LayerFocus(layer, self.focus.anchor))
            return
        if self.selection.contains(layer) and self.selection.layers is not None:
            span = self.selection.layers
        else:
            # Without a selection a drag takes the whole run: a single layer moved away would cut the run in two.
            run = shown.run_at(layer)
            span = (run.first, run.last)
            self.set_focus(LayerFocus(layer, layer))
        # A click selects the layer on release only: until then the press may begin a drag of the selection.
        self._clicked = LayerFocus(layer, layer)
        self.drag = LaneDrag(span, lane, at, shown.drop_devices(lane, shown.run_at(layer).device), self._threshold)

    def _press_part(self, shown: Shown, target: PartTarget, at: tuple[float, float], *, extend: bool) -> None:
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
        home = part_device(shown.preview.layout, MOVABLE_PARTS[target.part][0], layer)
        drag = LaneDrag(span, target.lane, at, shown.drop_devices(target.lane, home), self._threshold)
        drag.part = target.part
        self.drag = drag

    def pointer_moved(self, x: float, y: float) -> None:
        """Continue the drag to this point; if there is no drag, set `hover` to the part at this point."""
        shown = self._shown
        if shown is None:
            return
        drag = self.drag
        if drag is None:
            self.hover = shown.target_at(x, y)
        elif isinstance(drag, BoundaryDrag):
            self._send(drag.move_to(x, shown.track))
        elif isinstance(drag, LaneDrag):
            self._drag_lane(drag, drag.move_to(x, y, shown.lanes))
        else:
            span = drag.span_to(x, shown.track)
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
        shown = self._shown
        if shown is None or self.drag is not None:
            return False
        match shown.target_at(x, y):
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
        shown, focus = self._shown, self.focus
        if shown is None or not isinstance(focus, LayerFocus | OutputFocus | EmbeddingFocus | DraftFocus):
            return ()
        layout = shown.preview.layout
        if isinstance(focus, OutputFocus):
            here = {layout.output_device}
        elif isinstance(focus, EmbeddingFocus):
            here = {embedding_device(layout)}
        elif isinstance(focus, DraftFocus):
            here = set() if shown.preview.draft is None else set(shown.preview.draft.devices)
        else:
            first, last = focus.span
            here = {layout.device_of(layer) for layer in range(first, last + 1)}
        # A selection over several devices can also be moved to one of these.
        return tuple(device for device in shown.destinations() if here != {device})

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
        shown, focus = self._shown, self.focus
        if shown is None or not isinstance(focus, LayerFocus) or not shown.has_part(part, *focus.span):
            return ()
        layout, (first, last) = shown.preview.layout, focus.span
        here = {part_device(layout, name, layer) for name in MOVABLE_PARTS[part] for layer in range(first, last + 1)}
        return tuple(device for device in shown.destinations() if here != {device})

    def move_part_to(self, part: MovablePart, device: str) -> None:
        """Emit one move of a part of the focused layers to a device, and then `move_finished`."""
        if isinstance(self.focus, LayerFocus):
            self._send(PartMove(part, *self.focus.span, device))
            self.move_finished.emit()

    # The keyboard

    def step_stop(self, step: int) -> bool:
        """Move the focus to the next (`step` 1) or previous (-1) Tab stop; return False if there is none."""
        if self._shown is None or self.drag is not None:
            return False
        preview = self._shown.preview
        moves, draft = preview.embedding_moves, preview.draft is not None
        stop = next_stop(preview.layout, self.focus, step, embedding=moves, draft=draft)
        # In modes tensor and row the runs have no boundaries that could be moved.
        while _has_no_handle(self._shown, stop):
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
            shown, focus = self._shown, self.focus
            if shown is None or self.drag is not None or not isinstance(focus, LayerFocus):
                return False
            return shown.has_part("experts", *focus.span)
        return self._shown is not None and self.drag is None

    def perform(self, command: Command) -> None:
        """Carry out a keyboard command."""
        shown = self._shown
        if command is Command.CLEAR:
            if not self.cancel_drag():
                self.set_focus(None)
            return
        if shown is None or self.drag is not None:
            return
        layout = shown.preview.layout
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
                self._step_boundary(shown, -1 if command is Command.BOUNDARY_LEFT else 1)
            case Command.PIN | Command.PIN_EXPERTS if self.wants(command):
                part: MovablePart | None = "experts" if command is Command.PIN_EXPERTS else None
                self.pin_toggled.emit(PinToggle(self.selection.layers, part))
            case Command.EXPERTS_UP | Command.EXPERTS_DOWN if self.wants(command):
                self._step_experts(shown, -1 if command is Command.EXPERTS_UP else 1)
            case Command.FOLD | Command.FOLD_ALL if self.wants(command):
                self.folds_toggled.emit(self._folds(command))
            case Command.LANE_UP | Command.LANE_DOWN:
                self._step_lane(shown, -1 if command is Command.LANE_UP else 1)

    def _folds(self, command: Command) -> tuple[str, ...]:
        """Return the keys (`MachineGroup.key`) of the machines whose lanes the command folds or unfolds.

        A folded machine has one lane for all its devices. For `FOLD` this is the machine of the focused part. For
        `FOLD_ALL` these are all unfolded machines; if there are none, all machines.
        """
        shown, focus = self._shown, self.focus
        if shown is None:
            return ()
        if command is Command.FOLD_ALL:
            groups = [content.group for content in shown.contents if content.group is not None]
            unfolded = [group.key for group in groups if not group.is_folded]
            return tuple(unfolded or (group.key for group in groups))
        layout = shown.preview.layout
        match focus:
            case LayerFocus(layer):
                device = layout.device_of(layer)
            case BoundaryFocus(index):
                device = layout.runs[index + 1].device
            case OutputFocus():
                device = layout.output_device
            case EmbeddingFocus():
                device = embedding_device(layout)
            case DraftFocus() if shown.preview.draft is not None:
                device = shown.preview.draft.devices[0]
            case _:
                return ()
        group = shown.group_of(device)
        return () if group is None else (group.key,)

    def _step_boundary(self, shown: Shown, step: int) -> None:
        if isinstance(self.focus, BoundaryFocus):
            index, layout = self.focus.index, shown.preview.layout
            low, high = boundary_limits(layout, index)
            layer = layout.runs[index + 1].first + step
            if low <= layer <= high:
                self._send(BoundaryMove(index, layer))
                self.move_finished.emit()

    def _step_experts(self, shown: Shown, step: int) -> None:
        if isinstance(self.focus, LayerFocus):
            device = _next_device(shown, shown.part_lane("experts", self.focus.layer), step)
            if device is not None:
                self.move_part_to("experts", device)

    def _step_lane(self, shown: Shown, step: int) -> None:
        focus = self.focus
        if isinstance(focus, LayerFocus):
            lane = shown.lane_of_layer(focus.layer)
        elif isinstance(focus, OutputFocus):
            lane = shown.lane_of[shown.preview.layout.output_device]
        elif isinstance(focus, EmbeddingFocus):
            lane = shown.embedding_lane
        elif isinstance(focus, DraftFocus) and shown.draft_lane is not None:
            lane = shown.draft_lane
        else:
            return
        device = _next_device(shown, lane, step)
        if device is not None:
            self.move_to(device)


def _follow_lanes(drag: LaneDrag, before: Shown, shown: Shown) -> None:
    """Adapt `drag` to the lanes of a new preview, `shown`, so that the drag continues.

    The drag itself can remove lanes. If it takes the last layer from a device that the rig lacks, the lane of that
    device disappears. With fewer lanes, the head lanes of machines may disappear too.
    """
    names, others = ([content.device.id for content in each.contents] for each in (before, shown))
    if names != others:
        home = drag.devices[drag.lane]
        lane = shown.lane_of.get(home or names[drag.lane], drag.lane)
        drag.lane = min(lane, len(others) - 1)
        drag.devices = shown.drop_devices(drag.lane, home)


def _has_no_handle(shown: Shown, focus: Focus | None) -> bool:
    return isinstance(focus, BoundaryFocus) and focus.index >= len(shown.handles)


def _next_device(shown: Shown, lane: int, step: int) -> str | None:
    """Return the nearest device above (`step` -1) or below (1) `lane` that accepts layers; None if none does."""
    devices = shown.drop_devices()
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

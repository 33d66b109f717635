"""The accessibility tree of the editor: lanes with their layers, the output and the boundaries.

Qt makes an accessibility interface for a QObject, by its class. So each painted part has an `EditorElement`, which is
made when a screen reader first needs it. `EditorInterface` and `ElementInterface` read the current state of the view
when a screen reader asks, so nothing is updated during a drag.
"""

from __future__ import annotations

from enum import StrEnum
from functools import cache
from typing import TYPE_CHECKING, cast

from PySide6.QtCore import QObject, QPoint, QRect, QRectF
from PySide6.QtGui import QAccessible, QAccessibleEvent, QAccessibleInterface, QAccessibleObject, QWindow

from engine.base.language import tr
from engine.base.units import format_bytes
from engine.planning.layout.parts import embedding_device, part_text
from engine.planning.plan.placement_check import difference_text
from widgets.layout_editor.keyboard import BoundaryFocus, DraftFocus, EmbeddingFocus, Focus, LayerFocus, OutputFocus
from widgets.layout_editor.machines import row_of
from widgets.layout_editor.preview_geometry import PreviewGeometry
from widgets.layout_editor.texts import boundary_text, lane_sentence, parts_elsewhere

if TYPE_CHECKING:
    from widgets.layout_editor.view import EditorView

# As far around the line as the pointer takes the handle by its dot (`geometry.handle_at`), in pixels.
_HANDLE_REACH = 9.0
_MOVE_BOUNDARY = tr("Ctrl+Left and Ctrl+Right move the boundary by one layer")
_MOVE_LAYERS = tr("Ctrl+Up and Ctrl+Down move this part to the next device")
_MOVE_EXPERTS = tr("Ctrl+Up and Ctrl+Down move this layer to the next device; with Shift only the experts of the layer")


class Kind(StrEnum):
    """Kind of a part that the editor paints and that a screen reader can read, such as a lane or a layer."""

    LANE = "lane"
    LAYER = "layer"
    OUTPUT = "output"
    BOUNDARY = "boundary"
    EMBEDDING = "embedding"
    DRAFT = "draft"


ElementKey = tuple[Kind, int]
"""Kind and index of a painted part. A lane or layer has its own index. A boundary has the index of the run
(neighbouring layers on one device) left of it. Output, embedding and draft have the index 0.
"""


class EditorElement(QObject):
    """The QObject of a painted part, for the accessibility tree. It lives as long as the view and holds no state."""

    def __init__(self, view: EditorView, key: ElementKey) -> None:
        super().__init__(view)
        self.view = view
        self.key = key


class Parts:
    """The `EditorElement` objects of one view, by kind and index. Each is made when a screen reader first needs it."""

    def __init__(self, view: EditorView) -> None:
        self._view = view
        self._made: dict[ElementKey, EditorElement] = {}

    def __getitem__(self, key: ElementKey) -> EditorElement:
        part = self._made.get(key)
        if part is None:
            part = self._made[key] = EditorElement(self._view, key)
        return part

    def report_focus(self, focus: Focus | None) -> None:
        """Notify screen readers of the new focus."""
        # Without a screen reader nobody asks for parts, and each one that is made stays as long as the view.
        if focus is not None and QAccessible.isActive():
            QAccessible.updateAccessibility(QAccessibleEvent(self[key_of(focus)], QAccessible.Event.Focus))

    def report_change(self, before: PreviewGeometry | None, after: PreviewGeometry | None) -> None:
        """Notify screen readers if the summary of the editor or its tree of parts has changed."""
        # A drag comes here for every frame. `isActive` is False until an assistive program connects.
        if not QAccessible.isActive() or after is None:
            return
        if before is None or before.preview != after.preview or before.state is not after.state:
            QAccessible.updateAccessibility(QAccessibleEvent(self._view, QAccessible.Event.DescriptionChanged))
        if before is None or before.preview.layout != after.preview.layout or before.contents != after.contents:
            # One event for the whole tree: parts only change their places, and are never destroyed one by one.
            QAccessible.updateAccessibility(QAccessibleEvent(self._view, QAccessible.Event.ObjectReorder))


def key_of(focus: Focus) -> ElementKey:
    """Return kind and index of the part that has the keyboard focus."""
    match focus:
        case BoundaryFocus(index):
            return Kind.BOUNDARY, index
        case LayerFocus(layer):
            return Kind.LAYER, layer
        case OutputFocus():
            return Kind.OUTPUT, 0
        case EmbeddingFocus():
            return Kind.EMBEDDING, 0
        case DraftFocus():
            return Kind.DRAFT, 0


def children_of_view(geometry: PreviewGeometry | None) -> list[ElementKey]:
    """Return the lanes (one for each device) from top to bottom, then the boundaries between layers of two devices."""
    if geometry is None:
        return []
    lanes = [(Kind.LANE, lane) for lane in range(len(geometry.contents))]
    return lanes + [(Kind.BOUNDARY, handle.index) for handle in geometry.handles]


def children_of_lane(geometry: PreviewGeometry, lane: int) -> list[ElementKey]:
    """Return the parts that a lane has, from left to right: embedding, layers, output and draft."""
    content = geometry.contents[lane]
    # Only layers of the lane's own device: a layer whose experts an override puts here has one place in the tree.
    layers = [(Kind.LAYER, layer) for first, last in content.ranges for layer in range(first, last + 1)]
    if content.has_embedding and geometry.preview.embedding_moves:
        layers.insert(0, (Kind.EMBEDDING, 0))
    # A draft on several devices has one place in the tree: the first lane.
    draft = [(Kind.DRAFT, 0)] if geometry.draft_lane == lane else []
    return layers + ([(Kind.OUTPUT, 0)] if content.has_output else []) + draft


def is_shown(geometry: PreviewGeometry | None, key: ElementKey) -> bool:
    """Return whether the view shows the part `key`. It may have disappeared since a screen reader asked for it."""
    if geometry is None:
        return False
    kind, index = key
    counts = {
        Kind.LANE: len(geometry.contents),
        Kind.LAYER: geometry.preview.layout.n_layers,
        Kind.OUTPUT: 1,
        Kind.BOUNDARY: len(geometry.handles),
        Kind.EMBEDDING: 1 if geometry.preview.embedding_moves else 0,
        Kind.DRAFT: 0 if geometry.preview.draft is None or geometry.draft_lane is None else 1,
    }
    return index < counts[kind]


def name_of(geometry: PreviewGeometry, key: ElementKey) -> str:
    """Return the accessible name of one part of the editor. `geometry`: of the drawn preview. `key`: the part."""
    preview = geometry.preview
    match key:
        case Kind.LANE, lane:
            rows = {row.id: row for row in preview.report.rows}
            content = geometry.contents[lane]
            return tr("Lane {lane}", lane=lane_sentence(content, row_of(content, rows)))
        case Kind.LAYER, index:
            layer = preview.layers[index]
            size = format_bytes(layer.weights_bytes + layer.kv_bytes)
            words = tr(
                "layer {index} on {device}, {size}", index=index, device=preview.layout.device_of(index), size=size
            )
            elsewhere = (
                tr("{part} on {device}", part=part_text(part), device=device)
                for part, device in parts_elsewhere(preview.layout, layer)
            )
            found = difference_text(tuple(each for each in geometry.elsewhere if each.layer == index))
            return ". ".join(filter(None, (", ".join((words, *elsewhere)), found)))
        case Kind.EMBEDDING, _:
            return tr(
                "embedding on {device}, {size}",
                device=embedding_device(preview.layout),
                size=format_bytes(preview.token_embedding_bytes),
            )
        case Kind.DRAFT, _ if preview.draft is not None:
            return tr(
                "draft model {name} on {devices}, {size}",
                name=preview.draft.name,
                devices=", ".join(preview.draft.devices),
                size=format_bytes(preview.draft.size_bytes),
            )
        case Kind.BOUNDARY, index:
            return tr("boundary {boundary}", boundary=boundary_text(preview.layout, index))
    return tr(
        "output on {output_device}, {output_weights}",
        output_device=preview.layout.output_device,
        output_weights=format_bytes(preview.output_weights_bytes),
    )


def rect_of(geometry: PreviewGeometry, key: ElementKey) -> QRectF:
    """Return the rectangle of the painted part `key`, in scene coordinates."""
    match key:
        case Kind.LANE, lane:
            right = geometry.columns.bar_left + geometry.columns.bar_width
            return QRectF(0, geometry.lanes.track_top(lane), right, geometry.lanes.track_height)
        case Kind.LAYER, layer:
            return geometry.block_rect(geometry.lane_of_layer(layer), layer, layer)
        case Kind.EMBEDDING, _:
            return geometry.embedding_rect()
        case Kind.DRAFT, _:
            return geometry.draft_rect(geometry.draft_lane or 0)
        case Kind.BOUNDARY, index:
            handle = geometry.handles[index]
            return QRectF(handle.x - _HANDLE_REACH, handle.top, 2 * _HANDLE_REACH, handle.bottom - handle.top)
    return geometry.output_rect()


_ROLES = {
    Kind.LANE: QAccessible.Role.List,
    Kind.LAYER: QAccessible.Role.ListItem,
    Kind.OUTPUT: QAccessible.Role.ListItem,
    Kind.EMBEDDING: QAccessible.Role.ListItem,
    Kind.DRAFT: QAccessible.Role.ListItem,
    Kind.BOUNDARY: QAccessible.Role.Splitter,
}


class EditorInterface(QAccessibleObject):
    """Accessibility interface of the editor's view: a group of lanes and boundaries."""

    def __init__(self, view: EditorView) -> None:
        super().__init__(view)
        self._view = view

    def role(self) -> QAccessible.Role:
        return QAccessible.Role.Grouping

    def state(self) -> QAccessible.State:
        state = QAccessible.State()
        state.focusable = True
        state.focused = self._view.hasFocus() and self._view.interaction.focus is None
        state.invisible = not self._view.isVisible()
        return state

    def text(self, kind: QAccessible.Text) -> str:
        if kind is QAccessible.Text.Name:
            return self._view.accessibleName()
        return self._view.summary if kind is QAccessible.Text.Description else ""

    def rect(self) -> QRect:
        return QRect(self._view.mapToGlobal(QPoint(0, 0)), self._view.size())

    def window(self) -> QWindow | None:  # type: ignore[override]
        return self._view.window().windowHandle()

    def parent(self) -> QAccessibleInterface | None:  # type: ignore[override]
        around = self._view.parentWidget()
        return None if around is None else QAccessible.queryAccessibleInterface(around)

    def childCount(self) -> int:
        return len(children_of_view(self._view.preview_geometry))

    def child(self, index: int) -> QAccessibleInterface | None:  # type: ignore[override]
        return _child(self._view, children_of_view(self._view.preview_geometry), index)

    def indexOfChild(self, child: QAccessibleInterface) -> int:
        return _index(children_of_view(self._view.preview_geometry), child)

    def focusChild(self) -> QAccessibleInterface | None:  # type: ignore[override]
        focus = self._view.interaction.focus
        if focus is None or not self._view.hasFocus():
            return None
        return QAccessible.queryAccessibleInterface(self._view.parts[key_of(focus)])


class ElementInterface(QAccessibleObject):
    """Accessibility interface of one painted part. It reads the current state of the view."""

    def __init__(self, part: EditorElement) -> None:
        super().__init__(part)
        self._part = part

    @property
    def _geometry(self) -> PreviewGeometry | None:
        geometry = self._part.view.preview_geometry
        return geometry if is_shown(geometry, self._part.key) else None

    @property
    def _children(self) -> list[ElementKey]:
        kind, index = self._part.key
        return children_of_lane(self._geometry, index) if self._geometry is not None and kind is Kind.LANE else []

    def role(self) -> QAccessible.Role:
        return _ROLES[self._part.key[0]]

    def state(self) -> QAccessible.State:
        state, view, key = QAccessible.State(), self._part.view, self._part.key
        # Qt keeps an interface as long as its QObject, so a reader may still ask for a layer of the model before.
        if self._geometry is None:
            state.invalid = True
            return state
        kind, index = key
        # Only parts that Tab and the arrow keys reach, as in `keyboard.next_stop` and `next_layer`.
        state.focusable = kind is not Kind.LANE
        state.selectable = kind is Kind.LAYER
        state.selected = kind is Kind.LAYER and view.interaction.selection.contains(index)
        focus = view.interaction.focus
        state.focused = view.hasFocus() and focus is not None and key_of(focus) == key
        state.offscreen = not view.viewport().rect().intersects(self._rect_in_view())
        state.invisible = not view.isVisible()
        return state

    def text(self, kind: QAccessible.Text) -> str:
        geometry = self._geometry
        if geometry is None:
            return ""
        if kind is QAccessible.Text.Name:
            return name_of(geometry, self._part.key)
        if kind is not QAccessible.Text.Description or self._part.key[0] is Kind.LANE:
            return ""
        match self._part.key:
            case Kind.BOUNDARY, _:
                return _MOVE_BOUNDARY
            case Kind.LAYER, layer if geometry.has_part("experts", layer, layer):
                return _MOVE_EXPERTS
        return _MOVE_LAYERS

    def rect(self) -> QRect:
        if self._geometry is None:
            return QRect()
        # `mapFromScene` gives coordinates of the viewport, which begins below the ruler, not of the view.
        rect = self._rect_in_view()
        return QRect(self._part.view.viewport().mapToGlobal(rect.topLeft()), rect.size())

    def window(self) -> QWindow | None:  # type: ignore[override]
        return self._part.view.window().windowHandle()

    def parent(self) -> QAccessibleInterface | None:  # type: ignore[override]
        geometry, view = self._geometry, self._part.view
        # A layer's parent is the lane that holds it now; the tree must agree with `children_of_lane` in both
        # directions.
        match self._part.key:
            case Kind.LAYER, layer if geometry is not None:
                return QAccessible.queryAccessibleInterface(view.parts[Kind.LANE, geometry.lane_of_layer(layer)])
            case Kind.OUTPUT, _ if geometry is not None:
                lane = geometry.lane_of[geometry.preview.layout.output_device]
                return QAccessible.queryAccessibleInterface(view.parts[Kind.LANE, lane])
            case Kind.EMBEDDING, _ if geometry is not None:
                return QAccessible.queryAccessibleInterface(view.parts[Kind.LANE, geometry.embedding_lane])
            case Kind.DRAFT, _ if geometry is not None and geometry.draft_lane is not None:
                return QAccessible.queryAccessibleInterface(view.parts[Kind.LANE, geometry.draft_lane])
        return QAccessible.queryAccessibleInterface(view)

    def childCount(self) -> int:
        return len(self._children)

    def child(self, index: int) -> QAccessibleInterface | None:  # type: ignore[override]
        return _child(self._part.view, self._children, index)

    def indexOfChild(self, child: QAccessibleInterface) -> int:
        return _index(self._children, child)

    def _rect_in_view(self) -> QRect:
        geometry = self._part.view.preview_geometry
        assert geometry is not None
        return self._part.view.mapFromScene(rect_of(geometry, self._part.key)).boundingRect()


def _child(view: EditorView, keys: list[ElementKey], index: int) -> QAccessibleInterface | None:
    return QAccessible.queryAccessibleInterface(view.parts[keys[index]]) if 0 <= index < len(keys) else None


def _index(keys: list[ElementKey], child: QAccessibleInterface) -> int:
    # An interface of another widget, or of a part that is elsewhere by now, has no index here.
    part = child.object()
    return keys.index(part.key) if isinstance(part, EditorElement) and part.key in keys else -1


def _interface_of(name: str, thing: QObject) -> QAccessibleInterface | None:
    """Return the accessibility interface of an editor's view or part; None for another class.

    Qt calls this function with the name of the object's class, then with the names of the base classes.
    """
    if name == "EditorElement" and isinstance(thing, EditorElement):
        return ElementInterface(thing)
    return EditorInterface(cast("EditorView", thing)) if name == "EditorView" else None


@cache
def install() -> None:
    """Register the factory of the accessibility interfaces with Qt, once in the process."""
    QAccessible.installFactory(_interface_of)

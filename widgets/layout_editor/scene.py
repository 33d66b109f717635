"""The graphics scene of the editor: lanes, handles and highlights for one preview, updated in place."""

from __future__ import annotations

from PySide6.QtCore import QObject, QPointF, QRectF
from PySide6.QtWidgets import QGraphicsScene

from engine.planning.plan.preview import LoadedLayout, Preview
from widgets.common.palette import DARK, Palette
from widgets.common.text import Fonts
from widgets.layout_editor.geometry import (
    Columns,
    HandleGeometry,
    Track,
    columns,
    make_lanes,
    make_track,
)
from widgets.layout_editor.highlights import HandleItem, Highlights, OverlayItem, PillItem, handle_geometries
from widgets.layout_editor.lane import LaneGeometry, LaneItem, LaneValues
from widgets.layout_editor.machines import row_of, with_groups
from widgets.layout_editor.placement import LaneContent, lane_contents, placed_weights
from widgets.layout_editor.preview_geometry import PreviewGeometry, lanes_of
from widgets.layout_editor.texts import LOADED, lane_speed_text, loaded_texts


class EditorScene(QGraphicsScene):
    """Holds the graphics items of lanes, handles and highlights, and updates them in place with each preview."""

    def __init__(self, parent: QObject | None = None) -> None:
        super().__init__(parent)
        self.fonts = Fonts()
        self.palette_used: Palette = DARK
        self.preview_geometry: PreviewGeometry | None = None
        self._lanes: list[LaneItem] = []
        self._handles: list[HandleItem] = []
        self._overlay = OverlayItem()
        self._pill = PillItem(self.fonts)
        self.addItem(self._overlay)
        self.addItem(self._pill)
        # Few items that all move in place: an index would cost more than it saves.
        self.setItemIndexMethod(QGraphicsScene.ItemIndexMethod.NoIndex)

    def show_preview(
        self,
        preview: Preview,
        loaded: LoadedLayout | None,
        width: float,
        view_height: float,
        unfolded: frozenset[str] = frozenset(),
    ) -> PreviewGeometry:
        """Show `preview` in lanes (one row for each device) that are `width` pixels wide; return it with its geometry.

        `loaded`: the loaded layout, whose measured memory is shown if it is the layout of `preview`.
        `view_height`: height in pixels that the lanes fill, as far as the limits of a lane's height allow.
        `unfolded`: fingerprints of the paired computers that have a lane for each device, instead of one lane for all.
        """
        contents = with_groups(lane_contents(preview), preview.rig, preview.report.rows, unfolded)
        experts = any(layer.expert_bytes for layer in preview.layers)
        lanes = make_lanes(len(contents), view_height, experts=experts)
        lane_columns = columns(width)
        track = self._track_of(preview, lane_columns)
        state = loaded_texts(preview, loaded)
        values = _lane_values(preview, loaded if state is LOADED else None, contents)
        handles = handle_geometries(preview.layout, lanes_of(contents), track, lanes)
        elsewhere = loaded.elsewhere if loaded is not None and state is LOADED else ()
        self.preview_geometry = PreviewGeometry(
            preview, state, contents, lane_columns, lanes, track, handles, values, elsewhere
        )
        self._place_lanes(values, LaneGeometry(lane_columns, lanes, track, width))
        self._place_handles(handles)
        bounds = QRectF(0, 0, width, lanes.height)
        # A new rectangle makes the view place its scroll bars, which can resize the viewport and so come back here.
        if bounds != self.sceneRect():
            self.setSceneRect(bounds)
        return self.preview_geometry

    def set_highlights(self, highlights: Highlights, *, active: int | None, focused: int | None) -> None:
        """Highlight the rectangles in `highlights`, such as the selection, over the lanes.

        `active`: index of the boundary handle that is hovered or dragged, or None.
        `focused`: index of the boundary handle with the keyboard focus, or None.
        """
        self._overlay.set_highlights(highlights, self.sceneRect(), self.palette_used)
        for index, item in enumerate(self._handles):
            item.set_state(active=index == active, focused=index == focused)

    def set_pill(self, text: str, at: QPointF, visible: QRectF) -> None:
        """Show `text` as a label near the point `at`, inside the rectangle `visible`. An empty text hides the label."""
        self._pill.set_text(text, at, visible, self.palette_used)

    def _track_of(self, preview: Preview, lane_columns: Columns) -> Track:
        return make_track(
            [layer.weights_bytes for layer in preview.layers],
            preview.token_embedding_bytes,
            preview.output_weights_bytes,
            lane_columns.track_left,
            lane_columns.track_width,
            draft=preview.draft is not None,
        )

    def _place_lanes(self, values: tuple[LaneValues, ...], geometry: LaneGeometry) -> None:
        # Items are reused: making them again would lose their cached pictures in every frame of a drag.
        while len(self._lanes) < len(values):
            item = LaneItem(self.fonts)
            self.addItem(item)
            self._lanes.append(item)
        while len(self._lanes) > len(values):
            self.removeItem(self._lanes.pop())
        for lane, (item, value) in enumerate(zip(self._lanes, values, strict=True)):
            item.set_values(value, geometry, self.palette_used)
            item.setPos(0, lane * geometry.lanes.pitch)

    def _place_handles(self, handles: tuple[HandleGeometry, ...]) -> None:
        while len(self._handles) < len(handles):
            item = HandleItem()
            self.addItem(item)
            self._handles.append(item)
        while len(self._handles) > len(handles):
            self.removeItem(self._handles.pop())
        for item, handle in zip(self._handles, handles, strict=True):
            item.set_handle(handle, self.palette_used)


def _lane_values(
    preview: Preview, loaded: LoadedLayout | None, contents: tuple[LaneContent, ...]
) -> tuple[LaneValues, ...]:
    rows = {row.id: row for row in preview.report.rows}
    # Measured rows are as old as the load; `room` is the same device by its latest reading.
    measured = {} if loaded is None else {row.id: row for row in loaded.measured}
    # llama.cpp reports its buffers only, so the forecast is compared without the overhead of the process.
    forecast = {} if loaded is None else {row.id: row.without_overhead() for row in loaded.forecast}
    holdings = {device.id: device.holdings for device in preview.rig.all_devices}
    values = []
    for content in contents:
        key = content.device.id
        if content.group is not None:
            room, loaded_row, expected = (row_of(content, each) for each in (rows, measured, forecast))
            held = tuple(each for name in content.group.devices for each in holdings.get(name, ()))
            has_both = loaded_row is not None and expected is not None
            values.append(
                LaneValues(content, loaded_row if has_both else room, expected if has_both else None, room, held)
            )
            continue
        room, held = rows.get(key), holdings.get(key, ())
        time = "" if preview.speed is None else lane_speed_text(preview.speed.on(key))
        placed = placed_weights(preview, content, room)
        if key in measured and key in forecast:
            values.append(LaneValues(content, measured[key], forecast[key], room, held, time, placed))
        else:
            values.append(LaneValues(content, room, None, room, held, time, placed))
    return tuple(values)

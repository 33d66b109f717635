"""The graphics view of the layout editor: a lane (row) for each device, below a ruler with layer numbers.

It passes mouse and key events to `Interaction` in scene coordinates.
"""

from __future__ import annotations

from functools import partial

from PySide6.QtCore import QEvent, QPoint, Qt, QTimer, Signal
from PySide6.QtGui import (
    QAction,
    QContextMenuEvent,
    QFocusEvent,
    QHelpEvent,
    QHideEvent,
    QKeyEvent,
    QMouseEvent,
    QPainter,
    QResizeEvent,
    QTransform,
    QWheelEvent,
)
from PySide6.QtWidgets import QApplication, QFrame, QGraphicsView, QMenu, QToolTip, QWidget

from engine.base.language import tr
from engine.planning.layout.parts import MovablePart
from engine.planning.plan.preview import LoadedLayout, Preview
from widgets.common.painting import keep_left_to_right
from widgets.common.palette import Palette
from widgets.common.roles import plain_tool_tip
from widgets.common.text import zoom, zoomed
from widgets.layout_editor import accessible
from widgets.layout_editor.annotations import RULER_HEIGHT, Ruler
from widgets.layout_editor.drag import BoundaryDrag
from widgets.layout_editor.highlights import cursor_of, focus_device, highlights_of, pill_text, tooltip_of
from widgets.layout_editor.interaction import Interaction
from widgets.layout_editor.keyboard import (
    BoundaryFocus,
    Command,
    DraftFocus,
    EmbeddingFocus,
    Focus,
    LayerFocus,
    OutputFocus,
    command_of,
)
from widgets.layout_editor.placement import NO_PINS, Pins
from widgets.layout_editor.preview_geometry import HandleTarget, PreviewGeometry
from widgets.layout_editor.scene import EditorScene
from widgets.layout_editor.texts import accessible_summary, focus_text

_NAME = tr("Layout editor")
EXPERT_TITLES = {
    "to_cpu": tr("Move All Experts to the &CPU"),
    "back": tr("Move Experts &Back to the Devices of Their Layers, as Many as Fit"),
}
_SCROLL_BAR_GAP = 8
# Pixels from the upper and lower edge of the viewport in which a drag scrolls, by how much, and how often: 500 a
# second.
_SCROLL_EDGE = 24
_SCROLL_STEP = 8
_SCROLL_INTERVAL_MS = 16


def _same_model_and_devices(before: Preview, after: Preview) -> bool:
    """Return whether both previews have the same model and devices, so that a drag and a selection remain valid."""
    return (
        before.model_name == after.model_name
        and len(before.layers) == len(after.layers)
        and before.rig.ids == after.rig.ids
    )


def _has_menu(focus: Focus | None) -> bool:
    return isinstance(focus, LayerFocus | OutputFocus | EmbeddingFocus | DraftFocus)


class EditorView(QGraphicsView):
    """Graphics view of a layout's preview. Its `interaction` emits signals when the user moves or selects layers."""

    why_requested = Signal(str)
    """Requests the reason why layers or the output are on their device. The argument names them, such as "layers 3–5".
    """
    experts_requested = Signal(str)
    """Requests a move of the experts of all layers. The argument is a key of `EXPERT_TITLES`."""
    expert_outcomes_requested = Signal()
    """Requests the effects of the menu actions that move experts. The receiver calls `show_expert_outcomes`."""

    def __init__(self, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self._scene = EditorScene(self)
        keep_left_to_right(self)
        self.setScene(self._scene)
        self.interaction = Interaction(QApplication.startDragDistance(), self)
        self.interaction.folds_toggled.connect(self._toggle_folds)
        self._loaded: LoadedLayout | None = None
        self._pins = NO_PINS
        self._unfolded: frozenset[str] = frozenset()
        self.expert_actions: dict[str, QAction] = {}
        """Actions of the open menu that move the experts of all layers, by the key in `EXPERT_TITLES`."""
        self._pointer = QPoint()
        # A pointer that rests at the edge sends no events, so a timer goes on with the scrolling.
        self._scroll_timer = QTimer(self)
        self._scroll_timer.setInterval(_SCROLL_INTERVAL_MS)
        self._scroll_timer.timeout.connect(self._on_scroll_tick)
        self._ruler = Ruler(self)
        self.parts = accessible.Parts(self)
        """Accessibility objects of the painted parts."""
        accessible.install()
        self.setAccessibleName(_NAME)
        self.setAcceptDrops(False)  # A view takes every drag for its scene; dropped files are for the window.
        self.setFrameShape(QFrame.Shape.NoFrame)
        self.setAlignment(Qt.AlignmentFlag.AlignLeft | Qt.AlignmentFlag.AlignTop)
        # Lanes are made as wide as the viewport, so there is nothing to scroll to; a bar would take height for nothing.
        self.setHorizontalScrollBarPolicy(Qt.ScrollBarPolicy.ScrollBarAlwaysOff)
        self.setViewportUpdateMode(QGraphicsView.ViewportUpdateMode.MinimalViewportUpdate)
        self.setRenderHint(QPainter.RenderHint.Antialiasing)
        self.setFocusPolicy(Qt.FocusPolicy.StrongFocus)
        self.setViewportMargins(0, RULER_HEIGHT, 0, 0)
        # Without tracking, Qt sends moves only while a button is held, and nothing would be marked under the pointer.
        self.viewport().setMouseTracking(True)
        # The panel around the editor paints the background.
        self.viewport().setAutoFillBackground(False)
        self.verticalScrollBar().setSingleStep(24)

    @property
    def preview_geometry(self) -> PreviewGeometry | None:
        """The drawn preview of a layout, with its geometry in scene coordinates; None if nothing is drawn."""
        return self._scene.preview_geometry

    def set_preview(self, preview: Preview | None) -> None:
        """Show `preview`, or nothing if it is None. A drag continues, unless the model or the devices have changed."""
        before = self._scene.preview_geometry
        if preview is None:
            self._scene.preview_geometry = None
        else:
            self._show(preview)
        keeps_drag = before is not None and preview is not None and _same_model_and_devices(before.preview, preview)
        self.interaction.set_geometry(self._scene.preview_geometry, keeps_drag=keeps_drag)
        self.parts.report_change(before, self._scene.preview_geometry)
        if self.interaction.hover is not None and self.interaction.drag is None:
            # Another item may be under the pointer now.
            self._update_hover()
        self._update_highlights()

    def set_loaded(self, loaded: LoadedLayout | None) -> None:
        """Set the loaded layout, which is compared with the preview; None if no model is loaded."""
        self._loaded = loaded
        self._show_again()

    @property
    def summary(self) -> str:
        """The layout in sentences, for screen readers.

        The sentences are made on request, so that a drag spends no time on them.
        """
        geometry = self._scene.preview_geometry
        return "" if geometry is None else accessible_summary(geometry.preview, geometry.contents, geometry.state)

    def set_pins(self, pins: Pins) -> None:
        """Mark the pinned layers, parts of layers and output, which automatic layouts do not move."""
        self._pins = pins
        self._update_highlights()

    def apply_palette(self, palette: Palette) -> None:
        """Use the colours of `palette`, and the zoom of the interface."""
        self._scene.palette_used = palette
        # The scene knows no zoom: the view shows it larger, and maps the mouse back.
        self.setTransform(QTransform.fromScale(zoom(), zoom()))
        self._ruler.setGeometry(0, 0, self.viewport().width(), zoomed(RULER_HEIGHT))
        self.setViewportMargins(0, zoomed(RULER_HEIGHT), 0, 0)
        self._show_again()

    def _show(self, preview: Preview) -> None:
        size = self.viewport().size()
        # The memory bars are at the right end and would touch the scroll bar.
        width = size.width() - (_SCROLL_BAR_GAP if self.verticalScrollBar().isVisible() else 0)
        geometry = self._scene.show_preview(
            preview, self._loaded, width / zoom(), size.height() / zoom(), self._unfolded
        )
        self._ruler.set_track(geometry.track, self._scene.palette_used)

    def _toggle_folds(self, machines: tuple[str, ...]) -> None:
        self._unfolded ^= frozenset(machines)
        self._show_again()
        self._show_focus()

    def _show_again(self) -> None:
        if self._scene.preview_geometry is not None:
            self.set_preview(self._scene.preview_geometry.preview)

    def _update_highlights(self) -> None:
        geometry, state = self._scene.preview_geometry, self.interaction
        if geometry is None:
            return
        has_keyboard = self.hasFocus()
        highlights = highlights_of(
            geometry, state.focus, state.drag, state.hover, self._pins, has_keyboard=has_keyboard
        )
        active = state.hover.index if isinstance(state.hover, HandleTarget) else None
        if state.drag is not None:
            active = state.drag.index if isinstance(state.drag, BoundaryDrag) else None
        focused = state.focus.index if has_keyboard and isinstance(state.focus, BoundaryFocus) else None
        self._scene.set_highlights(highlights, active=active, focused=focused)
        visible = self.mapToScene(self.viewport().rect()).boundingRect()
        self._scene.set_pill(pill_text(state.drag), self.mapToScene(self._pointer), visible)
        # The viewport covers the view, so its cursor is the one that is shown.
        self.viewport().setCursor(cursor_of(state.drag, state.hover))
        name = f"{_NAME}, {focus_text(geometry.preview, state.focus)}" if state.focus is not None else _NAME
        if name != self.accessibleName():
            # Screen readers say a name that changes while the widget has the keyboard.
            self.setAccessibleName(name)
            if has_keyboard:
                self.parts.report_focus(state.focus)

    # Events

    def resizeEvent(self, event: QResizeEvent) -> None:
        """Fit lanes and ruler to the new size."""
        super().resizeEvent(event)
        self._ruler.setGeometry(0, 0, self.viewport().width(), zoomed(RULER_HEIGHT))
        self._show_again()

    def mousePressEvent(self, event: QMouseEvent) -> None:
        """Begin a drag, or set the focus to the part under the pointer."""
        if event.button() is not Qt.MouseButton.LeftButton or self.interaction.drag is not None:
            return
        QToolTip.hideText()
        self._pointer = event.position().toPoint()
        point = self.mapToScene(self._pointer)
        held = Qt.KeyboardModifier.ShiftModifier | Qt.KeyboardModifier.ControlModifier
        apart = bool(event.modifiers() & Qt.KeyboardModifier.AltModifier)
        self.interaction.press(point.x(), point.y(), extend=bool(event.modifiers() & held), apart=apart)
        self._update_highlights()

    def mouseMoveEvent(self, event: QMouseEvent) -> None:
        """Continue the drag, or highlight the part under the pointer."""
        self._pointer = event.position().toPoint()
        if self.interaction.drag is not None and not event.buttons() & Qt.MouseButton.LeftButton:
            # The release went elsewhere: the grab was lost.
            self._cancel_drag()
            return
        self._follow_pointer()
        near_edge = not _SCROLL_EDGE <= self._pointer.y() < self.viewport().height() - _SCROLL_EDGE
        if self.interaction.drag is None or not near_edge:
            self._scroll_timer.stop()
        elif not self._scroll_timer.isActive():
            self._scroll_timer.start()

    def mouseReleaseEvent(self, event: QMouseEvent) -> None:
        """End the drag."""
        if event.button() is Qt.MouseButton.LeftButton:
            self._scroll_timer.stop()
            self.interaction.release()
            self._follow_pointer()

    def mouseDoubleClickEvent(self, event: QMouseEvent) -> None:
        """Handle a double click as a press, so that two quick drags both begin."""
        self.mousePressEvent(event)

    def contextMenuEvent(self, event: QContextMenuEvent) -> None:
        """Show the menu of the part under the pointer; the menu key shows the menu of the focused part."""
        state = self.interaction
        if event.reason() is QContextMenuEvent.Reason.Keyboard:
            has_target = _has_menu(state.focus) and state.drag is None
        else:
            point = self.mapToScene(event.pos())
            has_target = state.focus_at(point.x(), point.y())
        self._update_highlights()
        if has_target:
            menu = self.context_menu()
            # `popup` returns at once, unlike `exec`, so the menu has to delete itself.
            menu.setAttribute(Qt.WidgetAttribute.WA_DeleteOnClose)
            menu.popup(event.globalPos())

    def context_menu(self) -> QMenu:
        """Return the menu of the focused layers, output, embedding or draft. The caller shows it."""
        geometry, state = self._scene.preview_geometry, self.interaction
        assert geometry is not None
        words = focus_text(geometry.preview, state.focus)
        menu = QMenu(self)
        # Not `addSection`: our style sheet draws its line and not its text.
        heading = menu.addAction((words[:1].upper() + words[1:]).replace("&", "&&"))
        heading.setEnabled(False)
        menu.addSeparator()
        submenu = menu.addMenu(tr("&Move to"))
        for device in state.destinations():
            # A single "&" in an action's text would make the next letter its mnemonic.
            submenu.addAction(device.replace("&", "&&"), partial(state.move_to, device))
        submenu.setEnabled(not submenu.isEmpty())
        if isinstance(state.focus, EmbeddingFocus | DraftFocus):
            return menu
        if isinstance(state.focus, LayerFocus):
            self._add_parts(menu, geometry)
            menu.addAction(tr("Select the &Group of Neighbouring Layers"), partial(self._perform, Command.SELECT_RUN))
        is_pinned = focus_device(self._pins, state.focus) is not None
        menu.addAction(tr("&Unpin") if is_pinned else tr("&Pin Here"), partial(self._perform, Command.PIN))
        menu.addSeparator()
        menu.addAction(tr("&Why Here?"), partial(self.why_requested.emit, words))
        return menu

    def _add_parts(self, menu: QMenu, geometry: PreviewGeometry) -> None:
        """Add the actions that move or pin parts of the focused layers, or that move the experts of all layers."""
        state = self.interaction
        assert isinstance(state.focus, LayerFocus)
        has_experts = geometry.has_part("experts", *state.focus.span)
        parts: list[tuple[MovablePart, str]] = [("dense", tr("Move &Attention and Dense Parts to"))]
        if has_experts:
            parts.insert(0, ("experts", tr("Move &Experts to")))
        for part, title in parts:
            submenu = menu.addMenu(title)
            for device in state.part_destinations(part):
                submenu.addAction(device.replace("&", "&&"), partial(state.move_part_to, part, device))
            submenu.setEnabled(not submenu.isEmpty())
        if has_experts:
            layer = state.focus.layer
            pinned = self._pins.part_device_of("experts", layer) is not None
            title = tr("Unpin E&xperts") if pinned else tr("Pin E&xperts Here")
            menu.addAction(title, partial(self._perform, Command.PIN_EXPERTS))
        if any(layer.expert_bytes for layer in geometry.preview.layers):
            menu.addSeparator()
            actions = {
                kind: menu.addAction(title, partial(self.experts_requested.emit, kind))
                for kind, title in EXPERT_TITLES.items()
            }
            self.expert_actions = actions
            menu.aboutToHide.connect(partial(self._forget_actions, actions))
            self.expert_outcomes_requested.emit()
            menu.addSeparator()

    def _forget_actions(self, actions: dict[str, QAction]) -> None:
        # The next menu may have been made already.
        if self.expert_actions is actions:
            self.expert_actions = {}

    def show_expert_outcomes(self, texts: dict[str, str]) -> None:
        """Show in the open menu what each action that moves experts would do.

        `texts`: the effect as text, by the key of the action in `EXPERT_TITLES`. An action without a text is disabled.
        """
        for kind, action in self.expert_actions.items():
            text = texts.get(kind, "")
            action.setText(f"{EXPERT_TITLES[kind]}  ({text})" if text else EXPERT_TITLES[kind])
            action.setEnabled(bool(text))

    def _perform(self, command: Command) -> None:
        self.interaction.perform(command)
        self._update_highlights()

    def wheelEvent(self, event: QWheelEvent) -> None:
        """Scroll. A drag continues at the point of the scene that is now under the pointer."""
        # The lanes move under a pointer that rests, and no mouse event tells so.
        super().wheelEvent(event)
        self._follow_pointer()

    def keyPressEvent(self, event: QKeyEvent) -> None:
        """Carry out the command of the key; a key without a command scrolls."""
        command = command_of(event.key(), event.modifiers())
        if command is None or not self.interaction.wants(command):
            super().keyPressEvent(event)
            return
        if self.interaction.drag is not None:
            self._scroll_timer.stop()
        self.interaction.perform(command)
        self._update_highlights()
        self._show_focus()

    def focusNextPrevChild(self, forward: bool) -> bool:
        """Handle Tab and Shift+Tab: move the focus to the next or previous boundary, output, embedding or draft.

        Past the last or first of them, the focus leaves the editor.
        """
        # `QWidget.event` calls this for Tab before `keyPressEvent`, which gets the key only if this returns False.
        if self.interaction.step_stop(1 if forward else -1):
            self._update_highlights()
            self._show_focus()
            return True
        return super().focusNextPrevChild(forward)

    def focusInEvent(self, event: QFocusEvent) -> None:
        """Show the focus ring. Tab sets it to the first boundary, output, embedding or draft, Shift+Tab to the last."""
        super().focusInEvent(event)
        if event.reason() is Qt.FocusReason.TabFocusReason:
            self.interaction.set_focus(None)
            self.interaction.step_stop(1)
        elif event.reason() is Qt.FocusReason.BacktabFocusReason:
            self.interaction.set_focus(None)
            self.interaction.step_stop(-1)
        self._update_highlights()

    def focusOutEvent(self, event: QFocusEvent) -> None:
        """Hide the focus ring. Cancel a drag if another window became active."""
        super().focusOutEvent(event)
        # Another window may take the release of the button, and the drag would go on without it.
        if event.reason() is Qt.FocusReason.ActiveWindowFocusReason:
            self._cancel_drag()
        self._update_highlights()

    def hideEvent(self, event: QHideEvent) -> None:
        """Cancel a drag when the editor is hidden."""
        super().hideEvent(event)
        self._cancel_drag()

    def event(self, event: QEvent) -> bool:
        """Claim the editor's keys, so that they do not trigger shortcuts of the window."""
        # Qt offers each key to the focused widget in this way first. Accepted, it comes to `keyPressEvent` as an
        # ordinary key.
        if isinstance(event, QKeyEvent) and event.type() is QEvent.Type.ShortcutOverride:
            command = command_of(event.key(), event.modifiers())
            if command is not None and self.interaction.wants(command):
                event.accept()
                return True
        return super().event(event)

    def viewportEvent(self, event: QEvent) -> bool:
        """Show the tooltip of the part under the pointer, and remove the hover mark when the pointer leaves."""
        if isinstance(event, QHelpEvent) and event.type() is QEvent.Type.ToolTip:
            self._show_tooltip(event)
            return True
        if event.type() is QEvent.Type.Leave and self.interaction.drag is None:
            self.interaction.hover = None
            self._update_highlights()
        return super().viewportEvent(event)

    def _show_tooltip(self, event: QHelpEvent) -> None:
        geometry = self._scene.preview_geometry
        if geometry is None or self.interaction.drag is not None:
            return
        point = self.mapToScene(event.pos())
        text = tooltip_of(geometry, geometry.target_at(point.x(), point.y()), self._pins)
        QToolTip.showText(event.globalPos(), plain_tool_tip(text), self.viewport())

    def _update_hover(self) -> None:
        point = self.mapToScene(self._pointer)
        self.interaction.pointer_moved(point.x(), point.y())

    def _follow_pointer(self) -> None:
        self._update_hover()
        self._update_highlights()

    def end_drag(self) -> None:
        """End the drag without emitting a signal. Used when the layout in which it began no longer exists."""
        self._scroll_timer.stop()
        self.interaction.end_drag()
        self._update_highlights()

    def _cancel_drag(self) -> None:
        self._scroll_timer.stop()
        if self.interaction.cancel_drag():
            self._update_highlights()

    def _on_scroll_tick(self) -> None:
        step = -_SCROLL_STEP if self._pointer.y() < _SCROLL_EDGE else _SCROLL_STEP
        bar = self.verticalScrollBar()
        bar.setValue(bar.value() + step)
        self._follow_pointer()

    def _show_focus(self) -> None:
        """Scroll to the item that has the focus."""
        geometry, focus = self._scene.preview_geometry, self.interaction.focus
        if geometry is None or focus is None:
            return
        if isinstance(focus, BoundaryFocus):
            handle = geometry.handles[focus.index]
            self.ensureVisible(handle.x, handle.dot_y - 8, 1, 16, 0, 24)
            return
        rects = highlights_of(geometry, focus, None, None, has_keyboard=True)
        for rect in (rects.focused, *rects.selected[-1:]):
            if rect is not None:
                self.ensureVisible(rect, 0, 16)

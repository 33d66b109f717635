"""Chat and load report of each open model. These widgets stay, with their state, while another model is shown."""

from __future__ import annotations

from collections.abc import Callable

from msgspec import Struct
from PySide6.QtCore import QObject, Signal
from PySide6.QtWidgets import QStackedWidget

from app.models.open_model import OpenModel
from app.models.open_models import OpenModels
from widgets.chat.chat_pane import ChatPane
from widgets.common.palette import DARK, Palette
from widgets.load_report.load_report import LoadReport
from widgets.markdown.typesetter import Typesetter


class ModelView(Struct, frozen=True):
    """The widgets that belong to one model: its chat and its load report."""

    chat: ChatPane
    report: LoadReport


class ModelViews(QObject):
    """Makes a view (chat and load report) for each open model, and shows the view of the current model.

    `present`: connects a new view with its model.
    """

    check_requested = Signal()
    """Emitted when the user clicks the button that examines this computer, which a load report has after a crash."""
    added = Signal(object)  # ModelView

    def __init__(
        self,
        models: OpenModels,
        chats: QStackedWidget,
        reports: QStackedWidget,
        present: Callable[[OpenModel, ModelView], None],
        typesetter: Typesetter,
        parent: QObject | None = None,
    ) -> None:
        super().__init__(parent)
        self._models = models
        self._chats = chats
        self._reports = reports
        self._present = present
        self._typesetter = typesetter
        self._palette = DARK
        self.left = models.current
        """The model whose chat is shown at the left, or alone."""
        self.right: OpenModel | None = None
        """The model whose chat is shown at the right; None if only one chat is shown."""
        self._views: dict[OpenModel, ModelView] = {}
        for model in models.all:
            self._add(model)
        models.added.connect(self._add)
        models.current_changed.connect(self._show)

    @property
    def all(self) -> tuple[ModelView, ...]:
        return tuple(self._views.values())

    @property
    def current(self) -> ModelView:
        return self._views[self._models.current]

    def of(self, model: OpenModel) -> ModelView:
        """Return the view (chat and load report) of `model`."""
        return self._views[model]

    def show_side_chat(self, model: OpenModel | None, stack: QStackedWidget) -> None:
        """Show the chat of a second model in `stack`, at the right; None removes it."""
        before, self.right = self.right, model
        # Back into the stack at the left: a widget has one parent.
        if before is not None:
            self._chats.addWidget(self._views[before].chat)
        if model is not None:
            stack.addWidget(self._views[model].chat)
            stack.setCurrentWidget(self._views[model].chat)
        if model is None or model is self.left:
            self.left = self._models.current
        self._chats.setCurrentWidget(self._views[self.left].chat)

    def flush(self) -> None:
        """Make all chats emit typed text at once, without the usual delay, so that it is stored."""
        for view in self.all:
            view.chat.flush()

    def copy_report(self) -> None:
        """Copy the load report of the current model to the clipboard."""
        self.current.report.copy()

    def apply_palette(self, palette: Palette) -> None:
        """Apply the colours of `palette` to all views."""
        self._palette = palette
        self._typesetter.apply_palette(palette)
        for view in self._views.values():
            view.chat.apply_palette(palette)
            view.report.apply_palette(palette)

    def _add(self, model: OpenModel) -> None:
        view = self._views[model] = ModelView(ChatPane(self._typesetter), LoadReport())
        view.report.apply_palette(self._palette)
        view.report.check_requested.connect(self.check_requested)
        view.chat.check_requested.connect(self.check_requested)
        view.chat.apply_palette(self._palette)
        self._chats.addWidget(view.chat)
        self._reports.addWidget(view.report)
        self._present(model, view)
        self.added.emit(view)

    def _show(self, model: OpenModel) -> None:
        # A click into the right chat makes its model current, which must not move it to the left.
        if model is not self.right:
            self.left = model
            self._chats.setCurrentWidget(self._views[model].chat)
        self._reports.setCurrentWidget(self._views[model].report)

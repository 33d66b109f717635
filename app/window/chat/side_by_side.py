"""Two conversations side by side, each with its own model. Meanwhile the window shows nothing but the chats."""

from __future__ import annotations

from PySide6.QtCore import QObject
from PySide6.QtWidgets import QApplication, QWidget

from app.models.open_model import OpenModel
from app.models.open_models import OpenModels
from app.models.opener import ModelOpener
from app.notices import Notices
from app.window.arrangement import Arrangement, Arranger
from app.window.model_views import ModelViews
from engine.base.language import tr
from widgets.chat.chat_view import ChatView


class SideBySide(QObject):
    """Shows the chat of a second model at the right. The model of the chat with the keyboard focus is current."""

    def __init__(
        self,
        models: OpenModels,
        opener: ModelOpener,
        views: ModelViews,
        chat_view: ChatView,
        arranger: Arranger,
        notices: Notices,
        window: QWidget,
    ) -> None:
        super().__init__(window)
        self._models = models
        self._opener = opener
        self._views = views
        self._chat_view = chat_view
        self._arranger = arranger
        self._notices = notices
        self._others: tuple[OpenModel, ...] = ()
        """Models that can be chosen for the right side, in the order in which they are offered."""
        self._former: Arrangement | None = None
        """The arrangement to restore when the second chat is closed; None if it need not change."""
        chat_view.side_model_chosen.connect(lambda index: self._show(self._others[index]))
        chat_view.side_chat_closed.connect(self.close)
        models.current_changed.connect(self._refresh)
        models.changed.connect(self._refresh)
        arranger.changed.connect(self._on_arranged)
        application = QApplication.instance()
        assert isinstance(application, QApplication)
        # A widget has no signal for the focus of its children; this one of Qt covers all widgets.
        application.focusChanged.connect(self._on_focus_changed)

    def toggle(self) -> None:
        """Show the chat of another open model at the right, or hide it."""
        if self._views.right is not None:
            self.close()
            return
        others = [model for model in self._models.all if model.file is not None and model is not self._models.current]
        if not others:
            self._notices.show(
                tr("To show two chats side by side, open a second model, or open this model a second time."), bad=True
            )
            return
        # Two chats need the width of the whole window.
        if self._arranger.current is not Arrangement.CHAT:
            self._former = self._arranger.current
            self._arranger.arrange(Arrangement.CHAT)
        # A loaded model can answer at once.
        self._show(next((model for model in others if model.held is not None), others[0]))

    def close(self) -> None:
        """Close the second chat, and return to the arrangement of panels that was shown before it was opened."""
        self._show(None)
        former, self._former = self._former, None
        if former is not None and self._arranger.current is Arrangement.CHAT:
            self._arranger.arrange(former)

    def _show(self, right: OpenModel | None) -> None:
        self._views.show_side_chat(right, self._chat_view.right_stack)
        self._refresh()

    def _refresh(self) -> None:
        right, left = self._views.right, self._views.left
        self._others = tuple(model for model in self._models.all if model.file is not None and model is not left)
        # The model at the right may have become the left one.
        if right is None or right not in self._others:
            self._chat_view.hide_side_chat()
            return
        names = [model.name for model in self._others]
        self._chat_view.show_side_chat(left.name, names, self._others.index(right))

    def _on_arranged(self, arrangement: Arrangement) -> None:
        if arrangement is not Arrangement.CHAT and self._views.right is not None:
            self.close()

    def _on_focus_changed(self, _before: QWidget | None, now: QWidget | None) -> None:
        right = self._views.right
        if right is None or now is None:
            return
        # The chat with the focus decides; menus and the settings bar then concern its model.
        for model in (right, self._views.left):
            if self._views.of(model).chat.isAncestorOf(now):
                self._opener.show(model)

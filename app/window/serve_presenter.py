"""The presenter of the API server panel: it shows the server's state and requests, and stores changed settings."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import TYPE_CHECKING

from PySide6.QtCore import QObject
from PySide6.QtGui import QAction

from app.models.open_models import OpenModels
from app.serving.api_server import ServerPhase, ServerState, WindowApiServer
from app.settings import Settings
from app.window.main_window import MainWindow
from engine.base.language import tr
from engine.base.units import format_count
from widgets.common.delayed_call import DelayedCall
from widgets.serve.request_table import RequestRow
from widgets.serve.serve_pane import ServePane, ServeSettings, ServeStatus

if TYPE_CHECKING:
    from engine.api.server.journal import RequestEntry

UPDATE_MS = 250
"""Least milliseconds between two updates of the request table. The table is not updated while no request changes."""


class ServePresenter(QObject):
    """Presenter of the API server panel: creates the panel when it is first shown, and fills it.

    The server can run without the panel.
    """

    def __init__(
        self, server: WindowApiServer, settings: Settings, models: OpenModels, starts: QAction, main: MainWindow
    ) -> None:
        super().__init__(main)
        self._server, self._settings, self._models, self._main = server, settings, models, main
        self._starts = starts
        """The checkable menu action that decides whether the server starts with the window."""
        self.pane: ServePane | None = None
        self._is_due = False
        self.n_updates = 0
        """Number of updates of the request table, for tests."""
        self._timer = DelayedCall(self, self._on_timer, UPDATE_MS)
        dock = main.serve_dock
        dock.visibilityChanged.connect(self._on_visibility_changed)
        if dock.isVisible():
            self._make()

    @property
    def is_waiting(self) -> bool:
        """Whether an update of the table is pending. Updates are at least `UPDATE_MS` apart."""
        return self._timer.isActive()

    def show(self) -> None:
        """Show the panel of the API server."""
        self._main.show_server()
        self._make().switch_button.setFocus()

    def _on_visibility_changed(self, visible: bool) -> None:
        if visible:
            self._make()
            self._update()

    def _make(self) -> ServePane:
        if self.pane is not None:
            return self.pane
        server, settings = self._server, self._settings
        pane = self.pane = ServePane(
            ServeSettings(
                settings.serve_host,
                settings.serve_port,
                settings.serve_needs_key,
                settings.serves_plain,
                settings.serves_at_start,
            )
        )
        pane.start_requested.connect(server.start)
        pane.stop_requested.connect(server.stop)
        pane.settings_changed.connect(self._keep)
        pane.key_requested.connect(server.show_key)
        pane.new_key_requested.connect(server.renew_key)
        pane.texts_toggled.connect(server.keep_texts)
        pane.request_chosen.connect(self._show_text)
        self._starts.toggled.connect(pane.show_starts)
        server.state_changed.connect(self._show_state)
        server.requests_changed.connect(self._on_requests_changed)
        server.models_changed.connect(self._show_model)
        self._models.current_changed.connect(self._show_model)
        self._main.serve_dock.setWidget(pane)
        self._show_state(server.state)
        self._update()
        return pane

    def _keep(self, chosen: ServeSettings) -> None:
        settings = self._settings
        settings.serve_host, settings.serve_port = chosen.host, chosen.port
        settings.serve_needs_key, settings.serves_plain = chosen.needs_key, chosen.allows_plain
        if chosen.starts_with_window != self._starts.isChecked():
            # As by a click in the menu, which stores it.
            self._starts.trigger()

    def _show_state(self, state: ServerState) -> None:
        assert self.pane is not None
        is_on = state.phase is ServerPhase.ON or (state.phase is ServerPhase.BUSY and bool(state.url))
        is_busy = state.phase is ServerPhase.BUSY
        self.pane.show_status(ServeStatus(is_on, is_busy, state.url, state.fault, state.key))
        self._show_model()

    def _show_model(self) -> None:
        assert self.pane is not None
        name, n_ctx = next(iter(self._server.contexts.items()), ("", 0))
        self.pane.show_model(name, n_ctx)

    # ------------------------------------------------------------------ requests

    def _on_requests_changed(self) -> None:
        if self._timer.isActive():
            self._is_due = True
        else:
            self._update()
            self._timer.start()

    def _on_timer(self) -> None:
        if self._is_due:
            self._is_due = False
            self._update()
            self._timer.start()

    def _update(self) -> None:
        """Show the requests in the table if the panel is visible. A hidden panel is updated when it is shown."""
        pane = self.pane
        if pane is None or not self._main.serve_dock.isVisible():
            return
        self.n_updates += 1
        entries = self._server.take_requests()
        pane.show_requests(request_rows(entries))
        self._show_text()

    def _show_text(self) -> None:
        pane = self.pane
        if pane is None or not pane.texts_box.isChecked():
            return
        number = pane.table.chosen
        text = None if number is None else self._server.text_of(number)
        if number is None:
            pane.show_text(tr("Select a request to see its text."))
        elif text is None:
            pane.show_text(
                tr(
                    "The text of this request was not stored. “Keep the texts of requests” stores the last requests "
                    "that arrive while it is on."
                )
            )
        else:
            pane.show_text("\n\n".join(text))


def request_rows(entries: Sequence[RequestEntry]) -> list[RequestRow]:
    """Return the requests as rows of the panel's table."""
    return [_row(entry) for entry in entries]


def _row(entry: RequestEntry) -> RequestRow:
    texts = (
        datetime.fromtimestamp(entry.began_s).strftime("%H:%M:%S"),
        entry.client,
        entry.model,
        format_count(entry.prompt_tokens) if entry.prompt_tokens else "",
        format_count(entry.answer_tokens) if entry.answer_tokens else "",
        "" if entry.tokens_per_second is None else f"{entry.tokens_per_second:.1f}",
        "" if entry.first_token_s is None else f"{entry.first_token_s:.2f} s",
        _status(entry),
    )
    lines = [f"{entry.path} · {_status(entry)}"]
    if entry.code:
        lines.append(entry.code)
    if entry.cached_tokens:
        lines.append(
            tr("{count} tokens of the prompt were already in the KV cache", count=format_count(entry.cached_tokens))
        )
    if entry.duration_s is not None:
        lines.append(tr("duration of the request: {seconds} s", seconds=f"{entry.duration_s:.2f}"))
    return RequestRow(entry.number, texts, "\n".join(lines))


def _status(entry: RequestEntry) -> str:
    if entry.is_under_way:
        return tr("answering") if entry.first_token_s is not None else tr("in progress")
    # nginx's status for a client that closed the connection before the answer.
    if entry.status == 499:
        return tr("client disconnected")
    return str(entry.status)

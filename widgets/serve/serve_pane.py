"""The panel of the API server: start and stop, requests, address and key, and snippets for other programs."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from msgspec import Struct
from PySide6.QtCore import Qt, Signal
from PySide6.QtGui import QFontDatabase, QGuiApplication
from PySide6.QtWidgets import (
    QCheckBox,
    QGridLayout,
    QHBoxLayout,
    QLineEdit,
    QPlainTextEdit,
    QPushButton,
    QScrollArea,
    QSplitter,
    QStackedWidget,
    QTabWidget,
    QWidget,
)

from engine.base.language import tr
from widgets.common.boxes import v_box
from widgets.common.elided_label import ElidedLabel
from widgets.common.inputs import ComboBox, SpinBox
from widgets.common.roles import plain_label, set_role
from widgets.serve.request_table import RequestRow, RequestTable
from widgets.serve.snippets import PROGRAMS, snippet

MASK = "•" * 12
"""Text that is shown instead of the key."""
EXAMPLE_MODEL = "MODEL"
"""Placeholder for the name of the model in snippets while no model is loaded."""


class ServeSettings(Struct, frozen=True):
    """Settings of the API server for its next start.

    `allows_plain`: whether requests without TLS are accepted also from other computers.
    `starts_with_window`: whether the server starts together with the window.
    """

    host: str
    port: int
    needs_key: bool
    allows_plain: bool
    starts_with_window: bool


class ServeStatus(Struct, frozen=True):
    """The state of the API server.

    `is_on`: whether the server runs. `is_busy`: whether the server is starting or stopping.
    `url`: address of the running server.
    `fault`: the reason why the server does not run, with a remedy; empty if there is no error.
    `key`: API key of the server; empty if the key has not been read yet.
    """

    is_on: bool = False
    is_busy: bool = False
    url: str = ""
    fault: str = ""
    key: str = ""


class ServePane(QWidget):
    """Shows the state of the API server, and emits a signal for each request of the user."""

    start_requested = Signal()
    stop_requested = Signal()
    settings_changed = Signal(ServeSettings)
    key_requested = Signal()
    """Emitted when the key must be read, because the user wants to show or copy it."""
    new_key_requested = Signal()
    texts_toggled = Signal(bool)
    request_chosen = Signal()

    def __init__(self, settings: ServeSettings, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self._status = ServeStatus()
        self._model, self._n_ctx = "", 0
        self._copy_with_key: Callable[[str], str] | None = None
        """A copy that waits for the API key: the function returns the text to copy, given the key. None if nothing
        waits.
        """
        self.switch_button = QPushButton()
        self.state_label = ElidedLabel("", "strong")
        self.copy_url_button = QPushButton(tr("Copy address"))
        self.error_label = plain_label("", "error", wrap=True)
        self.tabs = QTabWidget()
        self.tabs.setAccessibleName(tr("Pages of the API server panel"))
        self._make_requests()
        self._make_settings(settings)
        self._make_snippets()
        self._build()
        self._connect()
        self._refresh()

    # ------------------------------------------------------------------ structure

    def _make_requests(self) -> None:
        self.table = RequestTable()
        self.empty_label = plain_label(tr("No program has sent a request yet."), "dim", wrap=True)
        self.empty_label.setAlignment(Qt.AlignmentFlag.AlignCenter)
        self._stack = QStackedWidget()
        self.texts_box = QCheckBox(tr("Keep the texts of requests"))
        self.texts_box.setToolTip(
            tr("The texts of the last requests are kept in memory, and deleted when this setting is turned off.")
        )
        self.text_edit = QPlainTextEdit()
        self.text_edit.setReadOnly(True)
        self.text_edit.setTabChangesFocus(True)
        self.text_edit.setAccessibleName(tr("Text of the selected request and its answer"))
        self.text_edit.hide()

    def _make_settings(self, settings: ServeSettings) -> None:
        self.host_edit = QLineEdit(settings.host)
        self.host_edit.setAccessibleName(tr("Address to listen on"))
        self.port_box = SpinBox()
        self.port_box.setAccessibleName(tr("Port"))
        self.port_box.setRange(1, (1 << 16) - 1)
        self.port_box.setGroupSeparatorShown(False)
        self.port_box.setKeyboardTracking(False)
        self.port_box.setValue(settings.port)
        # As far from the frame as the text of the other fields.
        self.port_box.lineEdit().setTextMargins(6, 0, 0, 0)
        self.key_box = QCheckBox(tr("Require the key"))
        self.key_box.setChecked(settings.needs_key)
        self.plain_box = QCheckBox(tr("Allow unencrypted requests"))
        self.plain_box.setChecked(settings.allows_plain)
        self.start_box = QCheckBox(tr("Start the server with the window"))
        self.start_box.setChecked(settings.starts_with_window)
        self.key_edit = QLineEdit()
        self.key_edit.setReadOnly(True)
        self.key_edit.setAccessibleName(tr("Key"))
        self.show_key_button = QPushButton(tr("Show"))
        self.show_key_button.setAccessibleName(tr("Show the key"))
        self.show_key_button.setCheckable(True)
        self.copy_key_button = QPushButton(tr("Copy"))
        self.copy_key_button.setAccessibleName(tr("Copy the key"))
        self.new_key_button = QPushButton(tr("New key"))
        self.new_key_button.setToolTip(tr("After a new key is created, programs that use the old key are refused."))

    def _make_snippets(self) -> None:
        self.program_box = ComboBox()
        self.program_box.setAccessibleName(tr("Program"))
        self.program_box.addItems(PROGRAMS)
        self.copy_snippet_button = QPushButton(tr("Copy"))
        self.copy_snippet_button.setAccessibleName(tr("Copy the configuration snippet"))
        self.snippet_edit = QPlainTextEdit()
        self.snippet_edit.setReadOnly(True)
        self.snippet_edit.setTabChangesFocus(True)
        self.snippet_edit.setLineWrapMode(QPlainTextEdit.LineWrapMode.NoWrap)
        self.snippet_edit.setFont(QFontDatabase.systemFont(QFontDatabase.SystemFont.FixedFont))
        self.snippet_edit.setAccessibleName(tr("Configuration snippet"))

    def _build(self) -> None:
        head = QHBoxLayout()
        head.addWidget(self.switch_button)
        head.addWidget(self.state_label, 1)
        head.addWidget(self.copy_url_button)
        column = v_box(self, spacing=6, margins=(8, 4, 8, 8))
        column.addLayout(head)
        column.addWidget(self.error_label)
        column.addWidget(self.tabs, 1)
        self.tabs.addTab(self._requests_tab(), tr("Requests"))
        settings = _scrolling(self._settings_tab())
        settings.setAccessibleName(tr("Address and key"))
        self.tabs.addTab(settings, tr("Address and key"))
        self.tabs.addTab(self._snippets_tab(), tr("Programs"))

    def _requests_tab(self) -> QWidget:
        self._stack.addWidget(self.empty_label)
        self._stack.addWidget(self.table)
        parts = QSplitter(Qt.Orientation.Horizontal)
        parts.addWidget(self._stack)
        parts.addWidget(self.text_edit)
        parts.setStretchFactor(0, 2)
        parts.setStretchFactor(1, 1)
        parts.setChildrenCollapsible(False)
        parts.setAccessibleName(tr("Requests and their texts"))
        return parts

    def _settings_tab(self) -> QWidget:
        tab = QWidget()
        grid = QGridLayout(tab)
        grid.setContentsMargins(8, 8, 8, 8)
        grid.setVerticalSpacing(4)
        for row, (text, field) in enumerate(
            ((tr("Address"), self.host_edit), (tr("Port"), self.port_box), (tr("Key"), self.key_edit))
        ):
            label = plain_label(text, "dim")
            label.setBuddy(field)
            grid.addWidget(label, row, 0)
            grid.addWidget(field, row, 1)
        buttons = QHBoxLayout()
        for button in (self.show_key_button, self.copy_key_button, self.new_key_button):
            buttons.addWidget(button)
        buttons.addStretch(1)
        grid.addWidget(self.plain_box, 0, 2)
        grid.addWidget(self.start_box, 1, 2)
        grid.addLayout(buttons, 2, 2)
        grid.addWidget(self.key_box, 3, 1)
        grid.addWidget(self.texts_box, 3, 2)
        grid.setColumnStretch(1, 1)
        grid.setRowStretch(4, 1)
        return tab

    def _snippets_tab(self) -> QWidget:
        head = QHBoxLayout()
        label = plain_label(tr("Program"), "dim")
        label.setBuddy(self.program_box)
        head.addWidget(label)
        head.addWidget(self.program_box)
        head.addWidget(self.copy_snippet_button)
        head.addStretch(1)
        tab = QWidget()
        column = v_box(tab, margins=(6, 6, 6, 6))
        column.addLayout(head)
        column.addWidget(self.snippet_edit, 1)
        return tab

    def _connect(self) -> None:
        self.switch_button.clicked.connect(self._on_switch)
        self.copy_url_button.clicked.connect(lambda: _copy(f"{self._status.url}/v1"))
        self.texts_box.toggled.connect(self._on_texts_toggled)
        self.table.selectionModel().selectionChanged.connect(lambda *_selected: self.request_chosen.emit())
        self.host_edit.editingFinished.connect(self._emit_settings)
        self.port_box.valueChanged.connect(self._emit_settings)
        for box in (self.key_box, self.plain_box, self.start_box):
            box.clicked.connect(self._emit_settings)
        self.show_key_button.toggled.connect(self._on_show_key)
        self.copy_key_button.clicked.connect(lambda: self._copy_when_known(str))
        self.new_key_button.clicked.connect(self.new_key_requested.emit)
        self.program_box.currentIndexChanged.connect(self._show_snippet)
        self.copy_snippet_button.clicked.connect(self._on_copy_snippet)

    # ------------------------------------------------------------------ what is shown

    @property
    def settings(self) -> ServeSettings:
        """The settings that are entered in the fields."""
        return ServeSettings(
            self.host_edit.text().strip(),
            self.port_box.value(),
            self.key_box.isChecked(),
            self.plain_box.isChecked(),
            self.start_box.isChecked(),
        )

    def show_status(self, status: ServeStatus) -> None:
        """Show the state of the server.

        If a copy to the clipboard waits for the API key, it is done now, or dropped if `status` has a fault but no key.
        """
        self._status = status
        if status.key or status.fault:
            made, self._copy_with_key = self._copy_with_key, None
            if made is not None and status.key:
                _copy(made(status.key))
        self._refresh()

    def show_model(self, name: str, n_ctx: int) -> None:
        """Set the model that the configuration snippets for other programs name.

        `name`: empty if no model is loaded.
        `n_ctx`: context of one request, in tokens.
        """
        if (name, n_ctx) != (self._model, self._n_ctx):
            self._model, self._n_ctx = name, n_ctx
            self._show_snippet()

    def show_starts(self, starts: bool) -> None:
        """Show whether the server starts together with the window. Other parts of the window can change this too."""
        self.start_box.setChecked(starts)

    def show_text(self, text: str) -> None:
        """Show `text`: prompt and answer of the selected request, or a sentence that says why they are missing."""
        if text != self.text_edit.toPlainText():
            self.text_edit.setPlainText(text)

    def show_requests(self, rows: Sequence[RequestRow]) -> None:
        """Show the requests, newest first."""
        self.table.requests.set_rows(rows)
        self._stack.setCurrentWidget(self.table if rows else self.empty_label)

    def _refresh(self) -> None:
        status = self._status
        # It stays enabled while the server starts or stops: a button that is disabled loses the keyboard.
        self.switch_button.setText(tr("Stop server") if status.is_on else tr("Start server"))
        set_role(self.switch_button, "danger" if status.is_on else "good")
        if status.is_busy:
            words = tr("Stopping…") if status.is_on else tr("Starting…")
        else:
            words = tr("On: {url}", url=f"{status.url}/v1") if status.is_on else tr("Off")
        self.state_label.setText(words)
        self.copy_url_button.setEnabled(status.is_on)
        self.error_label.setText(status.fault)
        self.error_label.setVisible(bool(status.fault))
        # They count from the next start on.
        risk = tr(
            "Accepts requests from other computers without encryption. Anyone on the network can read such requests."
        )
        for field, tip in ((self.host_edit, ""), (self.port_box, ""), (self.key_box, ""), (self.plain_box, risk)):
            field.setEnabled(not status.is_on and not status.is_busy)
            field.setToolTip(tr("Stop the server to change this setting.") if status.is_on else tip)
        self.new_key_button.setEnabled(not status.is_busy)
        self._show_key()
        self._show_snippet()

    def _show_key(self) -> None:
        shown = self._status.key if self.show_key_button.isChecked() else MASK
        self.key_edit.setText(shown)
        self.key_edit.setCursorPosition(0)

    def _snippet(self, key: str) -> str:
        settings = self.settings
        url = self._status.url or f"http://{settings.host}:{settings.port}"
        return snippet(self.program_box.currentText(), url, key, self._model or EXAMPLE_MODEL, self._n_ctx or 4096)

    def _show_snippet(self) -> None:
        # The key is put in when the snippet is copied: somebody may be looking on.
        text = self._snippet(MASK if self.key_box.isChecked() else "")
        if text != self.snippet_edit.toPlainText():
            self.snippet_edit.setPlainText(text)

    # ------------------------------------------------------------------ what people do

    def _on_switch(self) -> None:
        if self._status.is_busy:
            return
        if self._status.is_on:
            self.stop_requested.emit()
        else:
            # A click does not take the focus from a field on every system.
            self._emit_settings()
            self.start_requested.emit()

    def _emit_settings(self) -> None:
        self.settings_changed.emit(self.settings)
        self._show_snippet()

    def _on_show_key(self, shown: bool) -> None:
        if shown and not self._status.key:
            self.key_requested.emit()
        self.show_key_button.setText(tr("Hide") if shown else tr("Show"))
        self.show_key_button.setAccessibleName(tr("Hide the key") if shown else tr("Show the key"))
        self._show_key()

    def _on_copy_snippet(self) -> None:
        if self.key_box.isChecked():
            self._copy_when_known(self._snippet)
        else:
            _copy(self._snippet(""))

    def _copy_when_known(self, made: Callable[[str], str]) -> None:
        """Copy the text that `made` returns for the API key. If the key is not known yet, request it and copy later."""
        if self._status.key:
            _copy(made(self._status.key))
        else:
            self._copy_with_key = made
            self.key_requested.emit()

    def _on_texts_toggled(self, keeps: bool) -> None:
        self.text_edit.setVisible(keeps)
        if not keeps:
            self.text_edit.clear()
        self.texts_toggled.emit(keeps)


def _scrolling(content: QWidget) -> QScrollArea:
    area = QScrollArea()
    area.setWidgetResizable(True)
    area.setWidget(content)
    return area


def _copy(text: str) -> None:
    QGuiApplication.clipboard().setText(text)

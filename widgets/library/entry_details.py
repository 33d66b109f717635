"""The details of one model: quantisations, paths, related files, and notes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from msgspec import Struct
from PySide6.QtCore import QEvent, QObject, Qt, Signal
from PySide6.QtWidgets import (
    QCheckBox,
    QFormLayout,
    QHBoxLayout,
    QLabel,
    QLayout,
    QLineEdit,
    QPlainTextEdit,
    QPushButton,
    QScrollArea,
    QWidget,
)

from engine.base.language import tr
from engine.library.entry import Copy, Entry, Quantisation
from engine.library.listed import Listed
from engine.library.notes import SavedDocument, tags_of
from widgets.common.boxes import v_box
from widgets.common.elided_label import ElidedLabel
from widgets.common.roles import plain_label, set_role
from widgets.library.entry_parts import PresetBox, QuantisationList, SavedLayouts
from widgets.library.entry_texts import fact_rows, fit_of, fit_sentence, place_lines, side_lines


class OpenRequest(Struct, frozen=True):
    """A request to open the model at `path`.

    `projector`: path of the projector to use; None to keep the choice that is saved for the model.
    """

    path: Path
    projector: Path | None = None


class RemovalRequest(Struct, frozen=True):
    """A request to move one copy of a quantisation to the trash. `entry`: the library's entry of the model."""

    entry: Entry
    quantisation: Quantisation
    copy: Copy


class NotesChange(Struct, frozen=True):
    """Changes to the user's notes on a model, such as its tags. A field is None if it has not changed.

    `text`: the notes as text. `preset`: name of the preset for new conversations.
    """

    model: Listed
    is_favourite: bool | None = None
    tags: tuple[str, ...] | None = None
    text: str | None = None
    preset: str | None = None

    @property
    def fields(self) -> dict[str, object]:
        """The changed fields with their new values; the names are those in `Notes`."""
        # Compared with None: False, no tags and an empty text are changes too.
        wanted = {"is_favourite": self.is_favourite, "tags": self.tags, "text": self.text, "preset": self.preset}
        return {name: value for name, value in wanted.items() if value is not None}


_NOTES_HEIGHT = 72
_BADGE_HEIGHT = 18
_BADGES = {"good": "badge-good", "bad": "badge-bad"}


class EntryDetails(QScrollArea):
    """Shows the details of one model, and emits requests to open, change or remove it."""

    open_requested = Signal(OpenRequest)
    removal_requested = Signal(RemovalRequest)
    forget_requested = Signal(object)  # tuple[Path, ...]
    notes_changed = Signal(NotesChange)

    def __init__(self, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self._model: Listed | None = None
        self._shown_facts: tuple[tuple[str, str], ...] = ()
        self._content = QWidget()
        self.title_label = ElidedLabel("", "title")
        self.favourite_button = QPushButton(tr("☆ Favourite"))
        self.fit_badge = QLabel()
        self.fit_label = plain_label("", "dim", wrap=True)
        self.error_label = plain_label("", "error", wrap=True)
        self.quantisations = QuantisationList()
        self.open_button = QPushButton(tr("Open"))
        self.projector_box = QCheckBox(tr("with the projector"))
        self.trash_button = QPushButton(tr("Trash…"))
        self.facts = QFormLayout()
        self.places_label = plain_label("", "dim", wrap=True)
        self.side_label = plain_label("", "dim", wrap=True)
        self.tags_edit = QLineEdit()
        self.notes_edit = QPlainTextEdit()
        self.preset_box = PresetBox()
        self.layouts = SavedLayouts()
        self._build()
        self._connect()
        self.show_model(None)

    @property
    def quantisation(self) -> Quantisation | None:
        """The selected quantisation."""
        return self.quantisations.current

    def show_model(self, model: Listed | None) -> None:
        """Show `model`, or nothing if it is None. If the model stays the same, text that is being typed is kept."""
        if model is not None and model == self._model:
            return
        # By key: a scan, a forecast or a saved note gives a new value of the same model.
        is_other = model is None or self._model is None or model.entry.key != self._model.entry.key
        if is_other:
            self._save_notes()
        self._model = model
        self._content.setVisible(model is not None)
        if model is None:
            return
        self.title_label.setText(model.entry.title)
        self.favourite_button.setText(tr("★ Favourite") if model.notes.is_favourite else tr("☆ Favourite"))
        self.quantisations.show_model(model, keep=not is_other)
        self._show_facts(fact_rows(model))
        sides = side_lines(model)
        self.side_label.setText("\n".join(sides))
        self._side_heading.setVisible(bool(sides))
        self.side_label.setVisible(bool(sides))
        # A scan in the background must not replace a text while it is being typed.
        if is_other or not self.tags_edit.hasFocus():
            self._set_tags(model)
        if is_other or not self.notes_edit.hasFocus():
            self._set_notes(model)
        if is_other:
            self.layouts.show_layouts(())
        # Notes are kept by the fingerprint of the header, so a model that was never read has no place for them.
        has_marks = any(each.facts is not None for each in model.entry.quantisations)
        self.preset_box.show_chosen(model.notes.preset)
        for widget in (self.favourite_button, self.tags_edit, self.notes_edit, self.preset_box):
            widget.setEnabled(has_marks)
        self._on_chosen()

    def save_notes(self) -> None:
        """Emit `notes_changed` for typed notes that were not reported yet."""
        self._save_notes()

    def _set_tags(self, model: Listed) -> None:
        if self.tags_edit.text() != ", ".join(model.notes.tags):
            self.tags_edit.setText(", ".join(model.notes.tags))

    def _set_notes(self, model: Listed) -> None:
        if self.notes_edit.toPlainText() != model.notes.text:
            self.notes_edit.setPlainText(model.notes.text)

    def _on_chosen(self) -> None:
        model, each = self._model, self.quantisation
        if model is None or each is None:
            return
        words, colour = fit_of(model, each)
        self.fit_badge.setText(words or tr("not checked yet"))
        set_role(self.fit_badge, _BADGES.get(colour, "badge-dim"))
        self.fit_label.setText("" if each.fault else fit_sentence(model, each))
        self.fit_label.setVisible(bool(self.fit_label.text()))
        self.error_label.setText(tr("This file {fault}.", fault=each.fault) if each.fault else "")
        self.error_label.setVisible(bool(each.fault))
        # `missing` are parts of a split file: llama.cpp needs all of them.
        self.open_button.setEnabled(not each.copy.is_missing and not each.copy.missing)
        self.projector_box.setVisible(model.entry.side_file("projector", each) is not None)
        self.trash_button.setText(tr("Remove") if each.copy.is_missing else tr("Trash…"))
        self.places_label.setText("\n".join(place_lines(model, each)))

    def _show_facts(self, rows: Sequence[tuple[str, str]]) -> None:
        # Rebuilding the form for every forecast that arrives would make it flicker.
        if rows == self._shown_facts:
            return
        self._shown_facts = tuple(rows)
        while self.facts.rowCount():
            self.facts.removeRow(0)
        for name, value in rows:
            self.facts.addRow(plain_label(name, "dim"), ElidedLabel(value))

    @property
    def open_request(self) -> OpenRequest | None:
        """The request that the button Open emits; None if the selected quantisation cannot be opened."""
        model, each = self._model, self.quantisation
        if model is None or each is None or not self.open_button.isEnabled():
            return None
        projector = model.entry.side_file("projector", each) if self.projector_box.isChecked() else None
        return OpenRequest(each.copy.path, None if projector is None else projector.file.path)

    def open(self) -> None:
        """Request to open the selected quantisation."""
        request = self.open_request
        if request is not None:
            self.open_requested.emit(request)

    def eventFilter(self, watched: QObject, event: QEvent) -> bool:
        """Emit `notes_changed` when the field for notes loses the focus and its text has changed."""
        # `QPlainTextEdit` has no `editingFinished` as the field for tags has.
        if watched is self.notes_edit and event.type() is QEvent.Type.FocusOut:
            self._save_notes()
        return super().eventFilter(watched, event)

    def toggle_favourite(self) -> None:
        """Request that the favourite mark of the model is added or removed."""
        if self._model is not None and self.favourite_button.isEnabled():
            self.notes_changed.emit(NotesChange(self._model, is_favourite=not self._model.notes.is_favourite))

    def _choose_preset(self, name: str) -> None:
        if self._model is not None:
            self.notes_changed.emit(NotesChange(self._model, preset=name))

    def remove(self) -> None:
        """Request to move the selected quantisation to the trash, or to remove a missing one from the list."""
        model, each = self._model, self.quantisation
        if model is None or each is None:
            return
        if each.copy.is_missing:
            self.forget_requested.emit(each.copy.paths)
        else:
            self.removal_requested.emit(RemovalRequest(model.entry, each, each.copy))

    def show_layouts(self, documents: Sequence[SavedDocument]) -> None:
        """List the saved layouts of this model. Documents whose kind is not "layout" are left out."""
        self.layouts.show_layouts(documents)

    def _save_notes(self) -> None:
        model = self._model
        # Called with the model that was shown before, whose texts are still in the fields.
        if model is None or not self.notes_edit.isEnabled():
            return
        tags, text = tags_of(self.tags_edit.text()), self.notes_edit.toPlainText().strip()
        if (tags, text) != (model.notes.tags, model.notes.text):
            self.notes_changed.emit(NotesChange(model, tags=tags, text=text))

    def _connect(self) -> None:
        self.quantisations.chosen.connect(self._on_chosen)
        self.quantisations.open_requested.connect(self.open)
        self.open_button.clicked.connect(self.open)
        self.favourite_button.clicked.connect(self.toggle_favourite)
        self.trash_button.clicked.connect(self.remove)
        self.preset_box.preset_chosen.connect(self._choose_preset)
        self.tags_edit.editingFinished.connect(self._save_notes)
        self.notes_edit.installEventFilter(self)

    def _build(self) -> None:
        self.setWidgetResizable(True)
        self.setHorizontalScrollBarPolicy(Qt.ScrollBarPolicy.ScrollBarAlwaysOff)
        self.setAccessibleName(tr("Details of the model"))
        column = v_box(self._content, spacing=8, margins=(16, 12, 16, 12))
        self.favourite_button.setProperty("role", "flat")
        self.open_button.setProperty("role", "primary")
        self.fit_badge.setProperty("role", "badge-dim")
        self.fit_badge.setMinimumHeight(_BADGE_HEIGHT)
        self.places_label.setTextInteractionFlags(Qt.TextInteractionFlag.TextSelectableByMouse)
        self.tags_edit.setPlaceholderText(tr("Tags, separated by commas"))
        self.tags_edit.setAccessibleName(tr("Tags"))
        self.notes_edit.setPlaceholderText(tr("Notes"))
        self.notes_edit.setAccessibleName(tr("Notes"))
        self.notes_edit.setFixedHeight(_NOTES_HEIGHT)
        # Notes need no tabs, and the keyboard could not leave the field otherwise.
        self.notes_edit.setTabChangesFocus(True)
        self.facts.setContentsMargins(0, 0, 0, 0)
        self.facts.setHorizontalSpacing(16)
        self.facts.setVerticalSpacing(3)
        self.facts.setFieldGrowthPolicy(QFormLayout.FieldGrowthPolicy.ExpandingFieldsGrow)
        self._side_heading = plain_label(tr("Related files"), "strong")
        column.addLayout(_row(self.title_label, self.favourite_button, stretch=0))
        column.addLayout(_row(self.fit_badge))
        for below in (self.fit_label, self.error_label, self.quantisations):
            column.addWidget(below)
        column.addLayout(_row(self.open_button, self.projector_box, None, self.trash_button))
        column.addLayout(self.facts)
        for widget in (
            plain_label(tr("Location"), "strong"), self.places_label, self._side_heading, self.side_label,
            plain_label(tr("Your notes"), "strong"), self.tags_edit, self.notes_edit, self.preset_box,
            self.layouts,
        ):  # fmt: skip
            column.addWidget(widget)
        column.addStretch(1)
        self.setWidget(self._content)


def _row(*widgets: QWidget | None, stretch: int | None = None) -> QLayout:
    """Return a row of widgets. None adds a gap; the widget at the index `stretch` gets the free space."""
    row = QHBoxLayout()
    row.setSpacing(8)
    for index, widget in enumerate(widgets):
        if widget is None:
            row.addStretch(1)
        else:
            row.addWidget(widget, 1 if index == stretch else 0)
    if stretch is None and None not in widgets:
        row.addStretch(1)
    return row

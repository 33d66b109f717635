"""Dialogs to exchange layouts with other programs: export as a command or file, and import of a command or file."""

from __future__ import annotations

from collections.abc import Sequence

from PySide6.QtCore import Qt, Signal
from PySide6.QtGui import QFontDatabase, QGuiApplication
from PySide6.QtWidgets import QDialogButtonBox, QFormLayout, QPlainTextEdit, QWidget

from engine.base.language import tr
from widgets.common.delayed_call import DelayedCall
from widgets.common.dialog import OK_CANCEL, Dialog
from widgets.common.inputs import ComboBox
from widgets.common.roles import plain_label

PAUSE_MS = 250
"""Time in milliseconds from the last typed letter until the text to import is read."""
_NOTES_LINES = 7


class _Notes(QPlainTextEdit):
    """A read-only text of a few sentences."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.setReadOnly(True)
        self.setTabChangesFocus(True)
        self.setAccessibleName(name)
        self.setFixedHeight(self.fontMetrics().lineSpacing() * _NOTES_LINES + 2 * self.frameWidth() + 8)

    def show_sentences(self, sentences: Sequence[str]) -> None:
        """Show the sentences as a list, each on lines of its own."""
        self.setPlainText("\n".join(f"• {sentence}" for sentence in sentences))


class _Code(QPlainTextEdit):
    """Text in a fixed font, without wrapping of long lines."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.setFont(QFontDatabase.systemFont(QFontDatabase.SystemFont.FixedFont))
        self.setLineWrapMode(QPlainTextEdit.LineWrapMode.NoWrap)
        self.setTabChangesFocus(True)
        self.setAccessibleName(name)


class ExportLayoutDialog(Dialog):
    """Shows the layout as a text for another program, with notes on settings that the text cannot express.

    `targets`: (key, title) of each program that a layout can be exported for.
    """

    target_changed = Signal(str)
    save_requested = Signal()

    def __init__(self, targets: Sequence[tuple[str, str]], parent: QWidget | None = None) -> None:
        super().__init__(tr("Export Layout"), parent)
        self.target_box = ComboBox()
        for key, title in targets:
            self.target_box.addItem(title, key)
        self.text_view = _Code(tr("Command or file"))
        self.text_view.setReadOnly(True)
        self.notes_label = plain_label("", wrap=True)
        self.notes_view = _Notes(tr("Settings that cannot be exported"))
        form = QFormLayout()
        form.addRow(tr("Program"), self.target_box)
        self.copy_button = self.add_button(tr("Copy"), self._copy)
        self.save_button = self.add_button(tr("Save…"), self.save_requested.emit)
        self.lay_out(form, self.text_view, self.notes_label, self.notes_view)
        self.target_box.currentIndexChanged.connect(lambda _index: self.target_changed.emit(self.target))
        self.resize(720, 560)

    @property
    def target(self) -> str:
        """Key of the chosen program."""
        return str(self.target_box.currentData())

    @property
    def text(self) -> str:
        """The command or file for the chosen program, as the dialog shows it."""
        return self.text_view.toPlainText()

    def show_text(self, text: str, notes: Sequence[str]) -> None:
        """Show the text for the chosen program. `notes`: sentences on what the text cannot express."""
        # Set only if it differs: a new text loses selection and scroll position.
        if text != self.text:
            self.text_view.setPlainText(text)
        self._show_notes(
            tr("Not exported, or exported differently:") if notes else tr("Everything can be exported."), notes
        )
        self._enable(bool(text))

    def show_error(self, sentence: str) -> None:
        """Show `sentence` as the reason why the layout cannot be exported."""
        self.text_view.setPlainText("")
        self._show_notes(tr("This layout cannot be exported:"), (sentence,))
        self._enable(False)

    def _show_notes(self, heading: str, notes: Sequence[str]) -> None:
        self.notes_label.setText(heading)
        self.notes_view.show_sentences(notes)
        self.notes_view.setVisible(bool(notes))

    def _enable(self, enabled: bool) -> None:
        self.copy_button.setEnabled(enabled)
        self.save_button.setEnabled(enabled)

    def _copy(self) -> None:
        QGuiApplication.clipboard().setText(self.text)


class ImportLayoutDialog(Dialog):
    """Reads a layout from text in the format of another program, such as a llama-server command, and shows it.

    The button OK accepts the layout that was read last.
    """

    text_changed = Signal()
    """Emitted when the text or the chosen model has changed, after a short pause."""
    open_requested = Signal()

    def __init__(self, parent: QWidget | None = None) -> None:
        super().__init__(tr("Import Layout"), parent, standard=OK_CANCEL)
        self.text_edit = _Code(tr("Command or file"))
        self.name_box = ComboBox()
        self.name_box.setAccessibleName(tr("Model in the configuration file"))
        self.name_box.hide()
        self.notes_label = plain_label("", wrap=True)
        self.notes_view = _Notes(tr("Result of the import"))
        self._pause = DelayedCall(self, self.text_changed.emit, PAUSE_MS)
        self.add_button(tr("Open File…"), self.open_requested.emit)
        introduction = tr(
            "Paste a command of llama-server or llama-cli, an entry of llama-swap, or a Modelfile of ollama. It is "
            "turned into a layout for the open model and the devices of this window."
        )
        self.lay_out(
            plain_label(introduction, "dim", wrap=True),
            self.text_edit,
            self.name_box,
            self.notes_label,
            self.notes_view,
        )
        self.text_edit.textChanged.connect(self._on_changed)
        self.name_box.activated.connect(lambda _index: self.text_changed.emit())
        self.resize(720, 560)
        self.clear()

    @property
    def text(self) -> str:
        """The entered text."""
        return self.text_edit.toPlainText()

    @property
    def name(self) -> str | None:
        """Name of the chosen model, if the text is a configuration file with several models; else None."""
        return self.name_box.currentText() if self.name_box.count() else None

    def clear(self) -> None:
        """Remove the text, the choice of models and the result."""
        self.text_edit.setPlainText("")
        self.set_names(())
        self.show_error("")

    def set_names(self, names: Sequence[str]) -> None:
        """Offer the models of a configuration file, by name. The chosen one stays chosen if it is among `names`."""
        if list(names) == [self.name_box.itemText(index) for index in range(self.name_box.count())]:
            return
        chosen = self.name_box.currentText()
        self.name_box.clear()
        self.name_box.addItems(list(names))
        self.name_box.setCurrentIndex(max(0, self.name_box.findText(chosen)))
        self.name_box.setVisible(bool(names))

    def show_result(self, heading: str, notes: Sequence[str]) -> None:
        """Show the result of reading the text, and enable OK.

        `heading`: the layout in words. `notes`: sentences on parts of the text that were left out.
        """
        self.notes_label.setText(heading)
        self.notes_view.show_sentences(notes)
        self.notes_view.setVisible(bool(notes))
        self._ok().setEnabled(True)

    def show_error(self, sentence: str) -> None:
        """Show `sentence` as the reason why there is no layout, and disable OK."""
        self.notes_label.setText(sentence)
        self.notes_view.hide()
        self._ok().setEnabled(False)

    def _on_changed(self) -> None:
        # What was read is of the text before; OK must not take it.
        self._ok().setEnabled(False)
        self._pause.start()

    def _ok(self) -> QWidget:
        button = self.buttons.button(QDialogButtonBox.StandardButton.Ok)
        button.setFocusPolicy(Qt.FocusPolicy.StrongFocus)
        return button

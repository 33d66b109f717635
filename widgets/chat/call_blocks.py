"""Tool calls of a message: a folded block with the arguments of each call, and an input for its result.

Layerdeck runs no tool. A person runs it, and types or pastes the result.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from PySide6.QtCore import Signal
from PySide6.QtWidgets import QPushButton, QToolButton, QWidget

from engine.base.language import tr
from engine.base.texts import fenced
from widgets.chat.prompt_edit import PromptEdit
from widgets.chat.shown import ShownCall
from widgets.common.delayed_call import DelayedCall
from widgets.common.elided_label import ElidedLabel
from widgets.common.roles import plain_label
from widgets.markdown.typesetter import Typesetter
from widgets.markdown.view import MarkdownView

ROW_PX = 24
INSET_PX = 14
GAP_PX = 6
DRAFT_INTERVAL_MS = 600
"""Interval in milliseconds at which the signal `typed` reports a result that is being typed."""


class ResultEdit(QWidget):
    """The input for the result of a tool call. Enter sends the result; Shift+Enter inserts a line break."""

    sent = Signal(str)
    typed = Signal(str)
    skipped = Signal()
    height_changed = Signal()

    def __init__(self, name: str, draft: str, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self.edit = PromptEdit(self)
        self.edit.setPlaceholderText(tr("Type or paste the result…"))
        self.edit.setAccessibleName(tr("Result of {name}", name=name))
        self.edit.setPlainText(draft)
        self.send_button = QPushButton(tr("Send result"), self)
        self.send_button.setProperty("role", "primary")
        self.skip_button = QPushButton(tr("Continue without result"), self)
        self._timer = DelayedCall(self, self._report, DRAFT_INTERVAL_MS)
        self.edit.submitted.connect(self._on_send)
        self.send_button.clicked.connect(self._on_send)
        self.skip_button.clicked.connect(self.skipped.emit)
        self.edit.textChanged.connect(self._on_typed)

    def fit(self, width: int) -> int:
        """Lay out the input field and the buttons for this width, and return the height.

        Buttons that do not fit side by side are stacked.
        """
        self.edit.setGeometry(0, 0, width, self.edit.height())
        top, right = self.edit.height() + GAP_PX, width
        for button in (self.send_button, self.skip_button):
            size = button.sizeHint()
            # In an empty row (`right == width`) a button is placed even if it is wider than the row.
            if right < width and right < size.width():
                top, right = top + size.height() + GAP_PX, width
            button.setGeometry(right - min(size.width(), width), top, min(size.width(), width), size.height())
            right -= size.width() + GAP_PX
        return top + self.send_button.sizeHint().height()

    def flush(self) -> None:
        """Emit `typed` at once if typed text has not been reported yet."""
        self._timer.flush()

    def _report(self) -> None:
        self.typed.emit(self.edit.toPlainText())

    def _on_typed(self) -> None:
        self.height_changed.emit()
        # Not restarted while somebody types: text is stored every 600 ms.
        self._timer.begin()

    def _on_send(self) -> None:
        self.flush()  # kept as a draft if the model cannot be asked now
        self.sent.emit(self.edit.toPlainText())


class CallBlock(QWidget):
    """Block of one tool call.

    Folded, it is a line with name and arguments. Unfolded, it shows the arguments as JSON and the id of the call.
    """

    height_changed = Signal()

    def __init__(self, typesetter: Typesetter, call: ShownCall, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self.call = call
        self.fold_button = QToolButton(self)
        self.fold_button.setProperty("role", "quiet")
        self.fold_button.setCheckable(True)
        self.fold_button.toggled.connect(self._on_toggled)
        self._preview = ElidedLabel("", "dim", self)
        self.view = MarkdownView(typesetter, self)
        self.view.setAccessibleName(tr("Arguments"))
        self.view.hide()
        self.view.height_changed.connect(self.height_changed)
        self._id = plain_label("", "dim", wrap=True)
        self._id.setParent(self)
        self._id.hide()
        self.result: ResultEdit | None = None
        self.show_call(call)

    @property
    def is_unfolded(self) -> bool:
        return self.fold_button.isChecked()

    def show_call(self, call: ShownCall) -> None:
        """Update the block to `call`, a new state of the same tool call.

        Text that a person has typed as the result is kept as long as the call needs a result.
        """
        self.call = call
        arrow = "▾" if self.is_unfolded else "▸"
        self.fold_button.setText(tr("{arrow} Calls {name}", arrow=arrow, name=call.name))
        self.fold_button.setAccessibleName(tr("Call of {name}", name=call.name))
        self._preview.setText(" ".join(call.arguments.split()))
        self._id.setText(tr("ID: {id}", id=call.id))
        # A folded block needs no Markdown: `_on_toggled` comes here when the block is unfolded.
        if self.is_unfolded:
            self.view.set_text(fenced(call.arguments, "json"))
        if self.result is not None and not call.wants_result:
            self.result.hide()
            self.result.deleteLater()
            self.result = None

    def make_result(self) -> ResultEdit:
        """Make the input for the result of this call, and return it."""
        self.result = ResultEdit(self.call.name, self.call.draft, self)
        self.result.height_changed.connect(self.height_changed)
        self.result.show()
        return self.result

    def fit(self, width: int) -> int:
        """Lay out all parts for this width, and return the height."""
        named = min(self.fold_button.sizeHint().width(), width)
        self.fold_button.setGeometry(0, 0, named, ROW_PX)
        self._preview.setVisible(not self.is_unfolded)
        self._preview.setGeometry(named + 4, 0, max(width - named - 4, 0), ROW_PX)
        top = ROW_PX
        self.view.setVisible(self.is_unfolded)
        self._id.setVisible(self.is_unfolded)
        if self.is_unfolded:
            top += self.view.fit(width - INSET_PX)
            self.view.move(INSET_PX, ROW_PX)
            height = self._id.heightForWidth(width - INSET_PX)
            self._id.setGeometry(INSET_PX, top, width - INSET_PX, height)
            top += height + GAP_PX
        if self.result is not None:
            height = self.result.fit(width)
            self.result.setGeometry(0, top, width, height)
            top += height + GAP_PX
        self.resize(width, top)
        return top

    def _on_toggled(self) -> None:
        self.show_call(self.call)
        self.height_changed.emit()


class CallsBox(QWidget):
    """The blocks of all tool calls of one answer."""

    sent = Signal(str, str)
    """Emitted with the id of a call and its result."""
    typed = Signal(str, str)
    """Emitted with the id of a call and the text of its result so far, while it is being typed."""
    skipped = Signal()
    """Emitted when the user wants the model to answer without the missing results."""
    height_changed = Signal()

    def __init__(self, typesetter: Typesetter, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self._typesetter = typesetter
        self.blocks: list[CallBlock] = []
        self.hide()

    def show_calls(self, calls: Sequence[ShownCall]) -> None:
        """Show `calls`. Existing blocks are updated in order, and keep their typed text."""
        while len(self.blocks) > len(calls):
            block = self.blocks.pop()
            block.hide()
            block.deleteLater()
        for index, call in enumerate(calls):
            if index == len(self.blocks):
                self._add(call)
            elif self.blocks[index].call != call:
                self.blocks[index].show_call(call)
            if call.wants_result and self.blocks[index].result is None:
                self._add_result(self.blocks[index])

    def unfolded(self) -> list[str]:
        """Return the names of the unfolded blocks, such as "call 0"; `unfold` accepts them."""
        return [f"call {index}" for index, block in enumerate(self.blocks) if block.is_unfolded]

    def unfold(self, parts: Collection[str]) -> None:
        """Unfold the blocks that are named in `parts`, and fold the others."""
        for index, block in enumerate(self.blocks):
            block.fold_button.setChecked(f"call {index}" in parts)

    def flush(self) -> None:
        """Emit `typed` at once for each result whose typed text has not been reported yet."""
        for block in self.blocks:
            if block.result is not None:
                block.result.flush()

    def fit(self, width: int) -> int:
        """Lay out all blocks for this width, and return the height."""
        top = 0
        for block in self.blocks:
            height = block.fit(width)
            block.move(0, top)
            top += height
        self.resize(width, top)
        return top

    def _add(self, call: ShownCall) -> None:
        block = CallBlock(self._typesetter, call, self)
        block.height_changed.connect(self.height_changed)
        # Qt does not show a child that is added to a visible widget.
        block.show()
        self.blocks.append(block)

    def _add_result(self, block: CallBlock) -> None:
        result = block.make_result()
        result.sent.connect(lambda text: self.sent.emit(block.call.id, text))
        result.typed.connect(lambda text: self.typed.emit(block.call.id, text))
        result.skipped.connect(self._on_skipped)

    def _on_skipped(self) -> None:
        self.flush()  # what was typed counts as the result
        self.skipped.emit()

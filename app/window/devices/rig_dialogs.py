"""Dialogs that add devices: the workers of a lab rig, a remote worker by its address, and a worker per NUMA node."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from PySide6.QtCore import Qt
from PySide6.QtWidgets import QLineEdit, QMessageBox, QWidget

from engine.base.language import tr
from engine.base.numa import NumaNode, numa_sentence, serving_nodes
from engine.base.units import parse_size
from engine.devices.endpoint import parse_endpoint
from widgets.common.dialog import EntryDialog
from widgets.common.roles import plain_label

REMOTE_WARNING = tr(
    "Remote workers use llama.cpp's RPC protocol, which has no authentication and no encryption. "
    "Anyone on the same network can use the worker and read the text you send to it. Add remote "
    "workers only on a network where you trust every computer."
)
# `GGML_SCHED_MAX_BACKENDS` is 16, and the CPU is one of these backends.
MAX_LAB_WORKERS = 15
_LAB_HELP = tr(
    "Starts workers on this computer; each acts as a separate device with a memory limit. Enter a memory limit for "
    "each worker, separated by commas."
)
_NUMA_HELP = tr(
    "Each NUMA node gets a worker that is bound to the node's processors and memory. Each worker is a separate "
    "device, and its processors read the layers from the memory of their own node. Whether this is faster depends on "
    "the computer: compare a layout on the workers with one on the CPU (Layout > Compare Speed). The workers and the "
    "CPU use the same memory, so place layers either on the workers or on the CPU."
)
_REMOTE_HELP = tr("On the other computer run: layerdeck-cli rig serve --host ITS-ADDRESS --port 50052")


class LineDialog(EntryDialog):
    """Asks for one line of text.

    `check`: raises `EngineError` or `ValueError` for an invalid text.
    """

    def __init__(self, parent: QWidget, title: str, help_text: str, value: str, check: Callable[[str], object]) -> None:
        super().__init__(title, parent, once=True)
        self.setMinimumWidth(420)
        self._check = check
        explanation = plain_label(help_text, wrap=True)
        explanation.setTextInteractionFlags(Qt.TextInteractionFlag.TextSelectableByMouse)
        self.line = QLineEdit(value)
        self.line.setAccessibleName(title)
        self.lay_out(explanation, self.line)
        self.line.selectAll()

    def entry(self) -> str:
        """Return the entered text without spaces at its ends.

        Raises:
            EngineError, ValueError: from `check`, if the text is invalid.
        """
        text = self.line.text().strip()
        self._check(text)
        return text


def parse_caps(text: str) -> tuple[int, ...]:
    """Return the memory caps in bytes of a list such as `"256MiB, 1GiB"`.

    Raises:
        ValueError: a size is invalid, or there are too many. The message is a sentence for the user.
    """
    caps = tuple(parse_size(part) for part in text.split(","))
    if any(cap == 0 for cap in caps):
        raise ValueError(tr("Each worker needs a memory limit above 0, such as 512MiB."))
    if len(caps) > MAX_LAB_WORKERS:
        raise ValueError(
            tr("At most {count} workers are possible: llama.cpp supports no more devices.", count=MAX_LAB_WORKERS)
        )
    return caps


def ask_lab_caps(parent: QWidget, then: Callable[[tuple[int, ...]], None]) -> None:
    """Ask for the memory caps of a lab rig (RPC workers on this computer), and call `then` with them, in bytes."""
    dialog = LineDialog(
        parent, tr("Start a lab rig (workers on this computer)"), _LAB_HELP, "256MiB, 256MiB, 512MiB", parse_caps
    )
    dialog.entered.connect(lambda text: then(parse_caps(text)))
    dialog.open()


def ask_numa_split(parent: QWidget, nodes: Sequence[NumaNode], then: Callable[[Sequence[NumaNode]], None]) -> None:
    """Explain the split by NUMA node, and call `then` with the usable nodes if the user agrees.

    If there are fewer than two such nodes, the dialog only explains that nothing can be split.
    """
    serving = serving_nodes(nodes)
    box = QMessageBox(
        QMessageBox.Icon.Information, tr("Split the CPU by NUMA node"), numa_sentence(nodes), parent=parent
    )
    box.setTextFormat(Qt.TextFormat.PlainText)
    box.setAttribute(Qt.WidgetAttribute.WA_DeleteOnClose)
    if serving:
        box.setInformativeText(_NUMA_HELP)
        start = box.addButton(tr("&Start Workers"), QMessageBox.ButtonRole.AcceptRole)
        start.clicked.connect(lambda: then(serving))
        box.addButton(QMessageBox.StandardButton.Cancel)
    else:
        box.addButton(QMessageBox.StandardButton.Ok)
    box.open()


def ask_remote_endpoint(
    parent: QWidget, *, warn: bool, on_warned: Callable[[], None], then: Callable[[str], None]
) -> None:
    """Ask for a remote worker's address, and call `then` with `host:port`.

    `warn`: whether to warn first that RPC has no encryption. `on_warned`: called if the user accepts the risk.
    """

    def ask() -> None:
        dialog = LineDialog(parent, tr("Add a remote worker"), _REMOTE_HELP, "", parse_endpoint)
        dialog.line.setPlaceholderText("192.0.2.7:50052")
        dialog.entered.connect(then)
        dialog.open()

    if not warn:
        ask()
        return
    box = QMessageBox(QMessageBox.Icon.Warning, tr("Before you add a remote worker"), REMOTE_WARNING, parent=parent)
    proceed = box.addButton(tr("I &trust this network"), QMessageBox.ButtonRole.AcceptRole)
    # Enter alone does not agree.
    box.setDefaultButton(box.addButton(QMessageBox.StandardButton.Cancel))

    def answered() -> None:
        if box.clickedButton() is proceed:
            on_warned()
            ask()
        # A box that was opened by `open` stays a child of the window until somebody deletes it.
        box.deleteLater()

    box.finished.connect(lambda _result: answered())
    box.open()

"""Automatic layouts from the menu: one undo step each, with the reason in the status line."""

from __future__ import annotations

from pathlib import Path

import pytest
from PySide6.QtWidgets import QMessageBox
from pytestqt.qtbot import QtBot

from app.wiring import WindowObjects
from engine.devices.device import CPU_ID
from engine.devices.rig_file import encode_rig
from engine.model.gguf.reader import read_model
from engine.planning.fit.strategies.catalogue import STRATEGIES
from engine.planning.layout.layout import single_device
from engine.planning.plan.edit import Edit
from engine.planning.settings.context_settings import ContextSettings
from tests.support.models import write_header_only
from tests.support.previews import make_gpu, make_rig


def open_on_cpu(window: WindowObjects, qtbot: QtBot, folder: Path) -> Edit:
    """Open a model with all layers on the CPU, beside two cards; return that."""
    path = write_header_only(folder / "model.gguf", n_layers=16, n_embd=2048, n_head=16, n_ff=8192, n_vocab=4096)
    model, rig = read_model(path), make_rig(make_gpu("CUDA0", 12), make_gpu("CUDA1", 16))
    edit = Edit(single_device(model.n_layers, CPU_ID), ContextSettings())
    (folder / "rig.json").write_bytes(encode_rig(rig))
    with qtbot.waitSignal(window.desk.rig.live.rig_changed):
        window.desk.rig.files.open(folder / "rig.json")
    window.desk.document.open(model, rig, edit)
    window.desk.opener.model_changed.emit(model)
    return edit


def test_without_a_model_there_is_nothing_to_lay_out(window: WindowObjects) -> None:
    window.desk.opener.model_changed.emit(None)
    assert not any(window.actions[f"auto_{name}"].isEnabled() for name in STRATEGIES)
    window.desk.auto_layouts.use("fewest")
    assert window.desk.document.edit is None


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_layout_is_found_told_and_undone(strategy: str, window: WindowObjects, qtbot: QtBot, tmp_path: Path) -> None:
    before = open_on_cpu(window, qtbot, tmp_path)
    with qtbot.waitSignal(window.desk.notices.given) as told:
        window.actions[f"auto_{strategy}"].trigger()
    found = window.desk.document.edit
    assert found is not None
    assert CPU_ID not in found.layout.devices
    assert (found.context.n_ctx > before.context.n_ctx) == (strategy == "context")
    assert told.args is not None
    assert "CUDA" in told.args[0].text
    assert not told.args[0].bad
    window.actions["undo"].trigger()
    assert window.desk.document.edit == before


def reason(window: WindowObjects) -> str:
    """Ask why a layer is where it is, and return the answer."""
    window.main.editor.why_requested.emit("layer 0")
    box = window.main.findChildren(QMessageBox)[-1]
    text = box.informativeText()
    box.close()
    return text


def test_the_reason_is_that_of_the_layout_that_is_shown(window: WindowObjects, qtbot: QtBot, tmp_path: Path) -> None:
    edit = open_on_cpu(window, qtbot, tmp_path)
    document = window.desk.document
    proposed = "This layout was proposed when the model was opened"
    assert reason(window).startswith(proposed)
    with qtbot.waitSignal(window.desk.auto_layouts.found) as found:
        window.actions["auto_fewest"].trigger()
    explanation, by_hand = found.args[0].explanation, "These layers were placed by hand or by a layout file."
    assert reason(window) == explanation
    layout = found.args[0].layout
    document.set_layout(layout.move_range(0, 0, "CUDA0"), "by hand")
    assert reason(window) == by_hand
    window.actions["undo"].trigger()
    assert reason(window) == explanation
    window.actions["undo"].trigger()
    assert reason(window).startswith(proposed)
    document.set_layout(layout.move_range(0, 0, "CUDA0"), "by hand")
    document.set_layout(edit.layout, "by hand")
    assert reason(window).startswith(proposed)
    # Another model with the same layout, which nobody has looked for.
    path = write_header_only(tmp_path / "other.gguf", n_layers=16, n_embd=2048, n_head=16, n_ff=8192, n_vocab=4096)
    document.open(read_model(path), window.desk.rig.live.rig, edit)
    document.set_layout(layout, "by hand")
    assert reason(window) == by_hand

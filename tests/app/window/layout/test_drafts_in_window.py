"""A draft model in the window: chosen in the settings, moved in the editor, undone, stored, read from layout files."""

from __future__ import annotations

from pathlib import Path

import pytest
from pytestqt.qtbot import QtBot

from app.window import dialogs
from app.window.layout.settings_presenter import _draft_choice
from app.wiring import WindowObjects
from engine.devices.rig_file import encode_rig
from engine.planning.layout.layout import split_evenly
from engine.planning.layout.moves import DraftMove
from engine.planning.memory.drafts import Draft
from engine.planning.plan.preview import DraftBlock
from tests.support.models import write_tiny_llama
from tests.support.mtp_models import write_mtp_model
from tests.support.previews import make_gpu, make_rig
from tests.support.windows import WindowOpener, open_with_model
from widgets.controls.draft_form import DraftForm
from widgets.controls.values import DraftChoice


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with a model, a draft model, and one of another vocabulary."""
    write_tiny_llama(tmp_path / "m.gguf", n_layers=6, n_ff=512)
    write_tiny_llama(tmp_path / "small.gguf", n_layers=1)
    write_tiny_llama(tmp_path / "other.gguf", n_layers=1, n_vocab=1000)
    (tmp_path / "rig.json").write_bytes(encode_rig(make_rig(make_gpu("CUDA0", 12), make_gpu("CUDA1", 16))))
    return tmp_path


@pytest.fixture
def window(open_window: WindowOpener, qtbot: QtBot, folder: Path) -> WindowObjects:
    return open_with_model(open_window, qtbot, folder)


def form_of(window: WindowObjects) -> DraftForm:
    window.main.settings_bar.context_editor.all_button.click()
    dialog = window.settings_presenter.dialog
    assert dialog is not None
    return dialog.side_files.draft


def choose(form: DraftForm, text: str) -> None:
    """Choose the entry of the box that begins with `text`, as a click does."""
    index = next(i for i in range(form.kind_box.count()) if form.kind_box.itemText(i).startswith(text))
    form.kind_box.setCurrentIndex(index)
    form.kind_box.activated.emit(index)


def draft_of(window: WindowObjects) -> Draft | None:
    edit = window.desk.document.edit
    assert edit is not None
    return edit.side_files.draft


def block_of(window: WindowObjects) -> DraftBlock | None:
    preview = window.desk.document.preview
    return None if preview is None else preview.draft


def with_file(window: WindowObjects, qtbot: QtBot, path: Path, monkeypatch: pytest.MonkeyPatch) -> DraftForm:
    form = form_of(window)
    monkeypatch.setattr(dialogs, "ask_open", lambda *_: path)
    with qtbot.waitSignal(window.desk.document.edit_settled):
        choose(form, "File")
    return form


def test_a_draft_is_chosen_placed_undone_and_kept(
    window: WindowObjects, open_window: WindowOpener, qtbot: QtBot, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    form = with_file(window, qtbot, folder / "small.gguf", monkeypatch)
    block = block_of(window)
    assert block is not None
    assert (block.name, block.devices, block.n_tokens) == ("small.gguf", ("CUDA0",), 4)
    assert form.kind_box.currentText().startswith("small")
    assert "The first graphics card with room" in form.line.text()
    form.device_chosen.emit("CUDA1")
    form.tokens_chosen.emit(7)
    block = block_of(window)
    assert block is not None
    assert (block.devices, block.n_tokens, form.device_box.currentText()) == (("CUDA1",), 7, "CUDA1")
    # As the editor does when the block is dragged to another lane.
    window.desk.document.move(DraftMove("CPU"))
    window.desk.document.finish_move()
    block = block_of(window)
    assert block is not None
    assert block.devices == ("CPU",)
    assert window.desk.document.undo_group.undoText() == "move the draft"
    window.actions["undo"].trigger()
    block = block_of(window)
    assert block is not None
    assert block.devices == ("CUDA1",)
    before = draft_of(window)
    window.main.close()
    again = open_with_model(open_window, qtbot, folder)
    assert draft_of(again) == before
    choose(form_of(again), "off")
    assert draft_of(again) is None
    again.actions["undo"].trigger()
    assert draft_of(again) == before


def test_n_gram_needs_no_device(window: WindowObjects) -> None:
    form = form_of(window)
    choose(form, "n-gram")
    assert draft_of(window) == Draft("ngram")
    assert block_of(window) is None
    assert not form.device_box.isVisibleTo(form)
    assert form.tokens_box.isVisibleTo(form)


def test_another_vocabulary_is_refused_and_the_draft_stays(
    window: WindowObjects, qtbot: QtBot, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    form = form_of(window)
    choose(form, "n-gram")
    monkeypatch.setattr(dialogs, "ask_open", lambda *_: folder / "other.gguf")
    with qtbot.waitSignal(window.desk.notices.given) as told:
        choose(form, "File")
    assert told.args[0].text.startswith("other.gguf: cannot draft for this model: the draft model has 1000 tokens")
    assert draft_of(window) == Draft("ngram")
    assert form.kind_box.currentText().startswith("n-gram")


def test_a_layout_file_brings_its_draft_as_one_step(
    window: WindowObjects, qtbot: QtBot, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with_file(window, qtbot, folder / "small.gguf", monkeypatch)
    before = draft_of(window)
    text = window.desk.layouts.text()
    assert text is not None
    window.desk.side_files.remove_draft()
    with qtbot.waitSignal(window.desk.document.edit_settled):
        window.desk.layouts.use("kept", text)
    assert draft_of(window) == before
    window.actions["undo"].trigger()
    assert draft_of(window) is None
    # Without the file of the draft the layout is still used, and has none.
    (folder / "small.gguf").unlink()
    window.desk.side_files.draft_by_ngrams()
    with qtbot.waitSignal(window.desk.notices.given) as told:
        window.desk.layouts.use("kept", text)
    assert "small.gguf: there is no such file" in told.args[0].text
    assert draft_of(window) is None


def test_a_layout_file_without_a_draft_brings_none(window: WindowObjects, tmp_path: Path, qtbot: QtBot) -> None:
    """A layout that was saved without a draft is that layout again, and undo brings the draft back."""
    text = window.desk.layouts.text()
    assert text is not None
    window.desk.side_files.draft_by_ngrams()
    window.desk.layouts.use("plain", text)
    assert draft_of(window) is None
    window.actions["undo"].trigger()
    assert draft_of(window) == Draft("ngram")
    path = tmp_path / "plain.json"
    path.write_text(text, encoding="utf-8")
    with qtbot.waitSignal(window.desk.document.edit_settled):
        window.desk.layouts.open(path)
    assert draft_of(window) is None


def test_a_draft_on_several_devices_or_on_one_that_is_gone_is_shown(window: WindowObjects, qtbot: QtBot) -> None:
    form = DraftForm()
    qtbot.addWidget(form)
    chosen: list[str] = []
    form.device_chosen.connect(chosen.append)
    for device in ("CUDA0, CUDA1", "CUDA7"):
        form.set_draft(DraftChoice("model", "/small.gguf", 4, device), (), ("CUDA0", "CUDA1", "CPU"))
        assert form.device_box.currentText() == device
        form.device_box.activated.emit(form.device_box.currentIndex())
        assert chosen == []
    form.device_box.setCurrentIndex(2)
    form.device_box.activated.emit(2)
    assert chosen == ["CUDA1"]
    form.set_draft(DraftChoice("model", "/small.gguf", 4, None), (), ("CUDA0",))
    assert form.device_box.currentIndex() == 0
    form.deleteLater()
    # A layout of two devices is told to the form as both.
    assert _draft_choice(Draft("model", layout=split_evenly(2, ("CUDA0", "CUDA1")))).device == "CUDA0, CUDA1"


def test_the_head_of_the_model_is_chosen_and_moved_with_the_last_layer(
    open_window: WindowOpener, qtbot: QtBot, folder: Path
) -> None:
    write_mtp_model(folder / "m.gguf")
    window = open_with_model(open_window, qtbot, folder)
    with qtbot.waitSignal(window.desk.document.edit_settled):
        choose(form_of(window), "MTP head")
    assert draft_of(window) == Draft("mtp")
    block = block_of(window)
    assert block is not None
    assert (block.name, block.size_bytes > 0) == ("", True)
    (here,) = block.devices
    target = "CUDA1" if here == "CUDA0" else "CUDA0"
    with qtbot.waitSignal(window.desk.document.edit_settled):
        window.desk.document.move(DraftMove(target))
        window.desk.document.finish_move()
    edit = window.desk.document.edit
    assert edit is not None
    assert edit.layout.assignment()[-1] == target
    moved = block_of(window)
    assert moved is not None
    assert moved.devices == (target,)


def test_a_model_without_a_head_offers_none(window: WindowObjects) -> None:
    box = form_of(window).kind_box
    assert not [index for index in range(box.count()) if box.itemText(index).startswith("MTP")]

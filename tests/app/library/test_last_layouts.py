"""The last layout of a model: saved when the user changes it, and offered when the model is opened again."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from zlib import crc32

import msgspec
import pytest
from pytestqt.qtbot import QtBot

from app.wiring import WindowObjects
from engine.library.facts import fingerprint
from engine.library.notes import SavedDocument
from tests.support.models import write_tiny_llama
from tests.support.windows import WindowOpener

Reopened = Callable[[], WindowObjects]


@pytest.fixture
def model(tmp_path: Path, request: pytest.FixtureRequest) -> Path:
    # Windows of one run share the library's index, in which equal files are one model.
    return write_tiny_llama(tmp_path / "model.gguf", n_layers=4, seed=crc32(request.node.name.encode()))


def opened(window: WindowObjects, path: Path, qtbot: QtBot) -> None:
    with qtbot.waitSignal(window.desk.opener.model_changed):
        window.desk.opener.open(path)


def change_context(window: WindowObjects, n_ctx: int) -> None:
    document = window.desk.document
    assert document.edit is not None
    document.set_context(msgspec.structs.replace(document.edit.context, n_ctx=n_ctx))


def last_of(window: WindowObjects, path: Path) -> list[SavedDocument]:
    return [each for each in window.desk.library.catalogue.documents_of(path) if each.kind == "last"]


def test_a_change_is_saved_and_offered_by_the_next_window(open_window: WindowOpener, model: Path, qtbot: QtBot) -> None:
    first = open_window()
    opened(first, model, qtbot)
    change_context(first, 512)
    first.main.close()
    window = open_window()
    said: list[str] = []
    window.desk.notices.given.connect(lambda notice: said.append(notice.text))
    opened(window, model, qtbot)
    qtbot.waitUntil(window.actions["use_last_layout"].isEnabled)
    assert said[-1] == "Layout > Use Last Layout restores the last layout of model."
    assert window.desk.document.is_untouched
    window.actions["use_last_layout"].trigger()
    edit = window.desk.document.edit
    assert edit is not None
    assert edit.context.n_ctx == 512
    assert window.desk.document.undo_group.undoText() == "open last layout"
    assert not window.actions["use_last_layout"].isEnabled()


def test_a_change_is_saved_while_the_window_is_open(open_window: WindowOpener, model: Path, qtbot: QtBot) -> None:
    window = open_window()
    opened(window, model, qtbot)
    change_context(window, 512)
    change_context(window, 1024)
    qtbot.waitUntil(lambda: bool(last_of(window, model)))
    (last,) = last_of(window, model)
    assert '"n_ctx": 1024' in last.text


def test_a_change_that_was_undone_is_not_saved(open_window: WindowOpener, model: Path, qtbot: QtBot) -> None:
    window = open_window()
    opened(window, model, qtbot)
    change_context(window, 512)
    window.desk.document.undo_group.undo()
    window.main.close()
    assert last_of(open_window(), model) == []


def test_a_layout_that_nobody_changed_is_neither_saved_nor_offered(
    open_window: WindowOpener, model: Path, qtbot: QtBot
) -> None:
    first = open_window()
    opened(first, model, qtbot)
    first.main.close()
    window = open_window()
    opened(window, model, qtbot)
    assert last_of(window, model) == []
    assert not window.actions["use_last_layout"].isEnabled()


def test_a_last_layout_that_is_the_proposal_is_not_offered(
    open_window: WindowOpener, model: Path, qtbot: QtBot
) -> None:
    window = open_window()
    opened(window, model, qtbot)
    text = window.desk.layouts.text()
    assert text is not None
    window.desk.library.catalogue.save_document(model, SavedDocument("last", "", text))
    found: list[bool] = []
    window.desk.last_layouts.offered_changed.connect(found.append)
    window.desk.opener.model_changed.emit(window.desk.document.model)
    # The reading of documents is queued before this one.
    with qtbot.waitSignal(window.desk.library.documents_found):
        window.desk.library.find_documents(())
    assert found == [False]


def test_a_damaged_last_layout_is_one_sentence_and_changes_nothing(
    open_window: WindowOpener, model: Path, qtbot: QtBot
) -> None:
    window = open_window()
    window.desk.library.catalogue.save_document(model, SavedDocument("last", "", '{"version": 1, "model'))
    opened(window, model, qtbot)
    qtbot.waitUntil(window.actions["use_last_layout"].isEnabled)
    before, said = window.desk.document.edit, list[str]()
    window.desk.notices.given.connect(lambda notice: said.append(notice.text))
    window.actions["use_last_layout"].trigger()
    assert window.desk.document.edit == before
    assert len(said) == 1
    assert "last layout" in said[0]


def said_of(window: WindowObjects) -> list[str]:
    said: list[str] = []
    window.desk.notices.given.connect(lambda notice: said.append(notice.text))
    return said


def test_a_file_that_has_changed_on_disk_keeps_its_layout(open_window: WindowOpener, model: Path, qtbot: QtBot) -> None:
    first = open_window()
    opened(first, model, qtbot)
    change_context(first, 512)
    first.main.close()
    write_tiny_llama(model, n_layers=4, seed=1 + crc32(model.parent.name.encode()))
    window = open_window()
    said = said_of(window)
    opened(window, model, qtbot)
    qtbot.waitUntil(window.actions["use_last_layout"].isEnabled)
    assert said[-1].startswith("The model file has changed since its last use. Layout > Use Last Layout")
    window.actions["use_last_layout"].trigger()
    edit = window.desk.document.edit
    assert edit is not None
    assert edit.context.n_ctx == 512


def test_a_layout_for_another_number_of_layers_is_refused_in_a_sentence_and_stays(
    open_window: WindowOpener, model: Path, qtbot: QtBot
) -> None:
    first = open_window()
    opened(first, model, qtbot)
    change_context(first, 512)
    first.main.close()
    write_tiny_llama(model, n_layers=6, seed=2 + crc32(model.parent.name.encode()))
    window = open_window()
    opened(window, model, qtbot)
    qtbot.waitUntil(window.actions["use_last_layout"].isEnabled)
    before, said = window.desk.document.edit, said_of(window)
    window.actions["use_last_layout"].trigger()
    assert window.desk.document.edit == before
    assert len(said) == 1
    assert "the layout is for a model of 4 layers, but this model has 6" in said[0]
    assert window.actions["use_last_layout"].isEnabled(), "it is not lost"


def test_deleted_layouts_of_a_file_that_is_the_same_do_not_come_back(
    open_window: WindowOpener, model: Path, qtbot: QtBot
) -> None:
    catalogue = open_window().desk.library.catalogue
    mine = SavedDocument("layout", "mine", "{}")
    catalogue.save_document(model, mine)
    assert catalogue.documents_of(model) == (mine,)
    catalogue.forget_document((fingerprint(model),), "layout", "mine")
    assert catalogue.documents_of(model) == ()
    catalogue.save_document(model, mine)
    catalogue.forget_document_of(model, mine)
    write_tiny_llama(model, n_layers=4, seed=3 + crc32(model.parent.name.encode()))
    assert catalogue.documents_of(model) == ()

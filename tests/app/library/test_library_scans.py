"""Library scans without a window: results, failures, and scans that a later one replaces."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest
from PySide6.QtCore import QObject, Signal
from pytestqt.qtbot import QtBot

from app.background import Background
from app.library.catalogue import LibraryCatalogue
from app.library.library import Library, Report
from app.models.open_model import OpenModel
from app.notices import Notice, Notices
from engine.base.cancellation import CancelToken
from engine.base.errors import LibraryError
from engine.library.census import Changes
from engine.library.fit import layout_key
from engine.library.removal import plan_removal, to_trash
from engine.library.stores import Store
from engine.planning.layout.layout import make_layout
from engine.runtime.session.events import Done
from tests.support.patience import DEADLINE_S
from tests.support.stores import model_bytes, put


@pytest.fixture
def said() -> list[str]:
    return []


@pytest.fixture
def library(qtbot: QtBot, tmp_path: Path, said: list[str]) -> Iterator[Library]:
    put(tmp_path / "models" / "ada-Q4_K_M.gguf", model_bytes())
    catalogue = LibraryCatalogue(tmp_path / "library.sqlite", lambda: [Store("folder", tmp_path / "models")])
    notices = Notices()
    background = Background()

    def note(notice: Notice) -> None:
        said.append(notice.text)

    notices.given.connect(note)
    library = Library(catalogue, _no_model, background, notices)
    yield library
    library.close()
    background.close()


def _no_model() -> OpenModel:
    raise AssertionError("no model is opened here")


def test_nothing_is_scanned_before_the_library_is_opened(library: Library, qtbot: QtBot) -> None:
    assert (library.contents.models, library.is_scanning) == ((), False)
    with qtbot.waitSignal(library.scan_finished):
        library.wake()
    assert [model.entry.title for model in library.contents.models] == ["ada"]
    assert library.contents.is_scanned
    assert not library.is_scanning


def test_a_scan_that_fails_is_over(
    library: Library, qtbot: QtBot, said: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It counted as running for good: folders were watched no more, and forecasts never made."""

    def fail(_catalogue: LibraryCatalogue) -> Changes:
        raise LibraryError("The index cannot be written.")

    with monkeypatch.context() as patched:
        patched.setattr(LibraryCatalogue, "scan", fail)
        library.scan()
        qtbot.waitUntil(lambda: bool(said))
    assert said == ["The index cannot be written."]
    assert not library.is_scanning
    with qtbot.waitSignal(library.scan_finished):
        library.scan()


def test_a_measured_speed_is_noted_with_its_layout(library: Library, tmp_path: Path, qtbot: QtBot) -> None:
    class Conversation(QObject):
        answer_finished = Signal(object)

    with qtbot.waitSignal(library.scan_finished):
        library.wake()
    path = tmp_path / "models" / "ada-Q4_K_M.gguf"
    layout, conversation = make_layout(4, ["CUDA0", "CUDA0", "CPU", "CPU"]), Conversation()
    loaded = SimpleNamespace(edit=SimpleNamespace(layout=layout))
    file, loading = SimpleNamespace(paths=(path,)), SimpleNamespace(loaded=loaded)
    model = SimpleNamespace(conversation=conversation, file=file, loading=loading)
    library.follow(cast(OpenModel, model))
    with qtbot.waitSignal(library.contents_changed):
        conversation.answer_finished.emit(Done(
            prompt_tokens=5, generated_tokens=100, prompt_tokens_per_second=50.0, generation_tokens_per_second=9.5,
            stop_reason="length",
        ))  # fmt: skip
    (shown,) = library.contents.models
    notes = shown.notes_of(shown.chosen)
    assert (notes.measured, notes.measured_on) == (9.5, "CUDA0, CPU")
    assert notes.is_measured_on(layout_key(layout))
    assert not notes.is_measured_on(layout_key(make_layout(4, ["CUDA0", "CPU", "CPU", "CPU"])))


def test_a_removed_model_takes_its_deleted_parts_from_the_list(library: Library, tmp_path: Path) -> None:
    catalogue = library.catalogue
    parts = [tmp_path / "models" / f"bob-0000{number}-of-00003.gguf" for number in (1, 2, 3)]
    for number, part in enumerate(parts):
        put(part, model_bytes(part=(number, 3)))
    catalogue.scan()
    parts[1].unlink()
    catalogue.scan()
    (_ada, bob) = (model.entry for model in catalogue.contents().models)
    removal = plan_removal(bob, bob.proposed, bob.proposed.copy, [bob])
    assert removal.paths == (parts[0], parts[2])
    to_trash(removal.paths, lambda path: Path(path).unlink())
    catalogue.forget_missing(removal.paths)
    catalogue.scan()
    assert [model.entry.title for model in catalogue.contents().models] == ["ada"]


def test_only_the_latest_work_is_delivered(library: Library, qtbot: QtBot) -> None:
    task, go_on, tokens, done = library.task(), threading.Event(), list[CancelToken](), list[int]()

    def work(number: int) -> Callable[[Report, CancelToken], int]:
        def wait(_report: Report, token: CancelToken) -> int:
            tokens.append(token)
            assert go_on.wait(DEADLINE_S)
            return number

        return wait

    task.run("first", "", work(1), done.append)
    qtbot.waitUntil(lambda: len(tokens) == 1)
    task.run("second", "", work(2), done.append)
    assert tokens[0].cancelled
    go_on.set()
    qtbot.waitUntil(lambda: bool(done))
    assert done == [2]

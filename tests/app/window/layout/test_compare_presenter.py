"""Layout > Compare Speed in the window: with the engine, and with failures."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
from pytestqt.qtbot import QtBot

from app.load.comparer import NamedEdit
from app.window import dialogs
from app.window.layout import compare_presenter
from app.wiring import WindowObjects
from engine.machines.bench import results as bench_results
from engine.machines.bench.results import Preset, read_results, write_results
from engine.machines.bench.runner import BenchProgress
from engine.planning.layout.layout_file import DraftEntry, LayoutFile, layout_document, write_layout
from engine.planning.memory.drafts import Draft
from engine.runtime.session.status import Phase
from tests.support.bench import measured, results_of
from tests.support.models import write_tiny_llama
from tests.support.patience import DEADLINE_MS
from tests.support.windows import WindowOpener
from widgets.bench.compare_dialog import CompareDialog


@pytest.fixture
def window(open_window: WindowOpener, qtbot: QtBot, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> WindowObjects:
    """A window with a small model."""
    monkeypatch.setitem(bench_results.PRESETS, "quick", Preset("quick", 1, 32, 16))
    opened = open_window()
    with qtbot.waitSignal(opened.desk.opener.model_changed, timeout=DEADLINE_MS):
        opened.desk.opener.open(write_tiny_llama(tmp_path / "m.gguf", n_layers=2))
    return opened


def opened_dialog(window: WindowObjects) -> CompareDialog:
    window.actions["compare_speed"].trigger()
    return next(each for each in window.main.findChildren(CompareDialog))


def wait_for_plan(window: WindowObjects, qtbot: QtBot) -> None:
    """Wait until the edited layout has its forecast: without it, Start waits."""
    document = window.desk.document
    qtbot.waitUntil(lambda: document.plan is not None and not document.is_behind, timeout=DEADLINE_MS)


def test_a_comparison_runs_and_its_winner_is_kept(window: WindowObjects, qtbot: QtBot, tmp_path: Path) -> None:
    desk = window.desk
    dialog = opened_dialog(window)
    wait_for_plan(window, qtbot)
    with qtbot.waitSignal(desk.comparer.finished, timeout=DEADLINE_MS):
        dialog.start_button.click()
    assert dialog.results is not None
    assert dialog.results.winner == compare_presenter.CURRENT
    assert dialog.status_label.text() == "One layout was measured. Add other layouts to compare."
    assert dialog.start_button.isEnabled()
    edit = desk.document.edit
    assert edit is not None
    desk.comparer.save(tmp_path / "r.json", dialog.results)
    qtbot.waitUntil((tmp_path / "r.json").exists, timeout=DEADLINE_MS)
    assert len(read_results(tmp_path / "r.json").layouts[0].samples) == 1
    assert not dialog.keep_button.isEnabled(), "the edited layout is the winner"
    desk.document.set_context(type(edit.context)(n_ctx=512))
    qtbot.waitUntil(dialog.keep_button.isEnabled)
    dialog.keep_button.click()
    assert desk.document.edit is not None
    assert desk.document.edit == edit
    assert "current layout" in dialog.status_label.text()


def test_a_loaded_model_is_unloaded_for_a_comparison_and_its_next_question_loads_it(
    window: WindowObjects, qtbot: QtBot
) -> None:
    desk = window.desk
    model = desk.models.current
    desk.loader.load()
    qtbot.waitUntil(lambda: model.loading.phase is Phase.READY, timeout=DEADLINE_MS)
    dialog = opened_dialog(window)
    assert dialog.unload_button.isHidden()
    dialog.start_button.click()
    # Free memory changed with the load, so the forecast may still be computed.
    qtbot.waitUntil(lambda: not dialog.unload_button.isHidden(), timeout=DEADLINE_MS)
    assert "Unload the model first" in dialog.status_label.text()
    with qtbot.waitSignal(desk.comparer.finished, timeout=DEADLINE_MS):
        dialog.unload_button.click()
        assert dialog.unload_button.isHidden()
    assert dialog.results is not None
    assert dialog.results.winner == compare_presenter.CURRENT
    assert model.is_parked


def test_a_dialog_that_is_closed_while_the_model_is_unloaded_compares_nothing(
    window: WindowObjects, qtbot: QtBot, monkeypatch: pytest.MonkeyPatch
) -> None:
    desk = window.desk
    park_all = desk.comparer.park_all
    pending: list[Callable[[], None]] = []
    # The end of the unloading is told after the dialog was closed, however fast the child exits.
    monkeypatch.setattr(desk.comparer, "park_all", pending.append)
    model = desk.models.current
    desk.loader.load()
    qtbot.waitUntil(lambda: model.loading.phase is Phase.READY, timeout=DEADLINE_MS)
    dialog = opened_dialog(window)
    dialog.start_button.click()
    qtbot.waitUntil(lambda: not dialog.unload_button.isHidden(), timeout=DEADLINE_MS)
    dialog.unload_button.click()
    dialog.close()
    ended: list[bool] = []
    park_all(lambda: ended.append(True))
    qtbot.waitUntil(lambda: bool(ended), timeout=DEADLINE_MS)
    assert not model.loading.has_child
    wait_for_plan(window, qtbot)
    pending.pop()()
    assert not desk.comparer.is_running


def test_a_dialog_that_is_closed_while_the_forecast_is_computed_compares_nothing(
    window: WindowObjects, monkeypatch: pytest.MonkeyPatch
) -> None:
    pending: list[Callable[[], None]] = []
    monkeypatch.setattr(window.desk.document, "when_forecast", pending.append)
    dialog = opened_dialog(window)
    dialog.start_button.click()
    dialog.close()
    pending.pop()()
    assert not window.desk.comparer.is_running


def test_the_winner_of_imported_results_is_one_undo_step(window: WindowObjects, qtbot: QtBot, tmp_path: Path) -> None:
    document = window.desk.document
    assert document.edit is not None
    assert document.model is not None
    context = document.edit.context
    other = LayoutFile("m", document.edit.layout, type(context)(n_ctx=256))
    layout = measured("theirs", [5.0] * 5)
    found = type(layout)(name="theirs", layout=layout_document(other), samples=layout.samples)
    write_results(tmp_path / "r.json", results_of(found))
    dialog = opened_dialog(window)
    with qtbot.waitSignal(window.desk.comparer.finished, timeout=DEADLINE_MS):
        window.desk.comparer.open(tmp_path / "r.json")
    assert "not comparable" in dialog.status_label.text(), "they are of a model called m"
    dialog.keep_button.click()
    assert document.edit.context.n_ctx == 256
    document.undo_group.undo()
    assert document.edit.context == context


def test_a_file_that_is_something_else_is_told(window: WindowObjects, qtbot: QtBot, tmp_path: Path) -> None:
    (tmp_path / "r.json").write_text("{}")
    dialog = opened_dialog(window)
    with qtbot.waitSignal(window.desk.comparer.failed, timeout=DEADLINE_MS):
        window.desk.comparer.open(tmp_path / "r.json")
    assert "no results of a speed comparison" in dialog.status_label.text()


def is_long(dialog: CompareDialog, count: int) -> bool:
    """Return whether the list has `count` layouts."""
    return dialog.layout_list.count() == count


def test_layout_files_are_added_with_names_of_their_own(window: WindowObjects, qtbot: QtBot, tmp_path: Path) -> None:
    document = window.desk.document
    assert document.edit is not None
    path = tmp_path / "mine.json"
    write_layout(path, LayoutFile("m", document.edit.layout, document.edit.context))
    dialog = opened_dialog(window)
    monkey = pytest.MonkeyPatch()
    with monkey.context() as patched:
        patched.setattr(dialogs, "ask_open", lambda *_: path)
        for count in (2, 3):
            dialog.add_layout_button.click()
            qtbot.waitUntil(partial(is_long, dialog, count), timeout=DEADLINE_MS)
    assert [dialog.layout_list.item(row).text() for row in range(3)] == ["current layout", "mine", "mine 2"]


def test_closing_the_dialog_ends_a_comparison(window: WindowObjects, qtbot: QtBot) -> None:
    dialog = opened_dialog(window)
    wait_for_plan(window, qtbot)
    with qtbot.waitSignal(window.desk.comparer.finished, timeout=DEADLINE_MS) as ended:
        dialog.start_button.click()
        assert window.desk.comparer.is_running
        dialog.close()
    assert "cancelled" in ended.args[0].ended


def test_the_remaining_time_is_shown(window: WindowObjects, qtbot: QtBot) -> None:
    dialog = opened_dialog(window)
    wait_for_plan(window, qtbot)
    with qtbot.waitSignal(window.desk.comparer.finished, timeout=DEADLINE_MS):
        dialog.start_button.click()
        window.desk.comparer.progressed.emit(BenchProgress("Loading first", 1, 10, results_of(), 7200.0))
        assert dialog.status_label.text() == "Loading first, about 2 h left…"


def test_layout_files_of_another_model_leave_the_list(window: WindowObjects, qtbot: QtBot, tmp_path: Path) -> None:
    """The dialog is not modal: another model may be opened beside it, and while a file is read."""
    desk = window.desk
    assert desk.document.edit is not None
    path = tmp_path / "mine.json"
    write_layout(path, LayoutFile("m", desk.document.edit.layout, desk.document.edit.context))
    dialog = opened_dialog(window)
    edit = desk.document.edit
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(dialogs, "ask_open", lambda *_: path)
        dialog.add_layout_button.click()
        qtbot.waitUntil(lambda: is_long(dialog, 2), timeout=DEADLINE_MS)
        late: list[Callable[[], None]] = []
        patched.setattr(desk.comparer, "read_layout", lambda *asked: late.append(lambda: asked[2]("late", edit)))
        dialog.add_layout_button.click()
    with qtbot.waitSignal(desk.opener.model_changed, timeout=DEADLINE_MS):
        desk.opener.open(write_tiny_llama(tmp_path / "other.gguf", n_layers=3))
    late[0]()
    wait_for_plan(window, qtbot)
    assert is_long(dialog, 1)
    with qtbot.waitSignal(desk.comparer.finished, timeout=DEADLINE_MS):
        dialog.start_button.click()
    assert dialog.results is not None
    assert dialog.results.model.n_layers == 3


def test_each_layout_is_measured_with_the_draft_of_its_file(
    window: WindowObjects, qtbot: QtBot, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file without a draft is compared without one, and the winner is kept with what was measured."""
    desk = window.desk
    edit = desk.document.edit
    assert edit is not None
    for name, draft in (("plain", None), ("drafted", DraftEntry("ngram", n_tokens=7))):
        write_layout(tmp_path / f"{name}.json", LayoutFile("m", edit.layout, edit.context, draft))
    desk.side_files.draft_by_ngrams()
    dialog = opened_dialog(window)
    for count, name in enumerate(("plain", "drafted"), start=2):
        monkeypatch.setattr(dialogs, "ask_open", lambda *_, name=name: tmp_path / f"{name}.json")
        dialog.add_layout_button.click()
        qtbot.waitUntil(partial(is_long, dialog, count), timeout=DEADLINE_MS)
    asked: list[NamedEdit] = []
    monkeypatch.setattr(desk.comparer, "start", lambda _plan, chosen, *_, **_options: asked.extend(chosen))
    wait_for_plan(window, qtbot)
    dialog.start_button.click()
    qtbot.waitUntil(lambda: len(asked) == 3, timeout=DEADLINE_MS)
    assert [each.edit.side_files.draft for each in asked] == [Draft("ngram"), None, Draft("ngram", 7)]
    found = measured("drafted", [5.0] * 5)
    layout = layout_document(LayoutFile("m", edit.layout, edit.context, DraftEntry("ngram", n_tokens=7)))
    desk.comparer.finished.emit(results_of(type(found)(name="drafted", layout=layout, samples=found.samples)))
    dialog.keep_button.click()
    assert desk.document.edit is not None
    assert desk.document.edit.side_files.draft == Draft("ngram", 7)

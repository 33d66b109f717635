"""Slow forecasts run outside the GUI thread; at the end they match the present edit."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from PySide6.QtWidgets import QApplication
from pytestqt.qtbot import QtBot

from app.background import Background
from app.models import forecaster
from app.models.document import LayoutDocument
from app.models.forecaster import Pace
from engine.base.errors import CancelledError
from engine.base.units import GIB, MIB
from engine.base.values import replace
from engine.devices.device import CPU_ID, Device, Rig, make_host
from engine.model.gguf.model_file import ModelFile
from engine.model.gguf.reader import read_model
from engine.planning.layout.layout import Layout, make_layout
from engine.planning.layout.moves import BoundaryMove, RangeMove
from engine.planning.plan.edit import Edit
from engine.planning.plan.plan import Plan
from engine.planning.plan.preview import Preview, PreviewCache, make_preview
from engine.planning.settings.context_settings import ContextSettings
from tests.support.models import write_tiny_llama
from tests.support.selection import examples

N_LAYERS = 8
PLACES = ("RPC0", "RPC1", CPU_ID)
CARDS = tuple(
    Device(f"RPC{number}", f"worker {number}", "RPC", "gpu", 512 * MIB, endpoint=f"127.0.0.1:{50052 + number}")
    for number in range(2)
)
RIG = Rig(CARDS, make_host("host", 8 * GIB))
ALONE = Rig(CARDS[:1], make_host("host", 8 * GIB))
ALWAYS, NEVER = -1.0, 1e9
"""Seconds from which on a computation is beside the GUI thread."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> ModelFile:
    return read_model(write_tiny_llama(tmp_path_factory.mktemp("model") / "tiny.gguf", n_layers=N_LAYERS))


@contextmanager
def opened(qtbot: QtBot, model: ModelFile) -> Iterator[LayoutDocument]:
    """Give a document with a model on the table, none of it computed yet beside."""
    background = Background()
    document = LayoutDocument(background)
    document.open(model, RIG, Edit(make_layout(N_LAYERS, ["RPC0"] * 4 + ["RPC1"] * 4), ContextSettings(n_ctx=512)))
    try:
        yield document
    finally:
        settle(qtbot, document)
        background.close()
        document.deleteLater()
        background.deleteLater()


@pytest.fixture
def document(qtbot: QtBot, model: ModelFile, monkeypatch: pytest.MonkeyPatch) -> Iterator[LayoutDocument]:
    with opened(qtbot, model) as found:
        monkeypatch.setattr(forecaster, "DIRECT_S", ALWAYS)
        yield found


def settle(qtbot: QtBot, document: LayoutDocument) -> None:
    qtbot.waitUntil(lambda: not document.is_behind and not document._frame.isActive())


def right(document: LayoutDocument, rig: Rig) -> Preview:
    """Return what has to be drawn in the end, computed anew."""
    assert document.model is not None
    assert document.edit is not None
    tables = PreviewCache(document.model)
    return make_preview(tables, Plan(tables.memory, rig, document.edit))


def gather(document: LayoutDocument, device: str) -> None:
    document.set_layout(make_layout(N_LAYERS, [device] * N_LAYERS), "gather")


# ---------------------------------------------------------------------- any sequence


def _settings(document: LayoutDocument, n_ctx: int) -> None:
    assert document.edit is not None
    document.set_context(msgspec.structs.replace(document.edit.context, n_ctx=n_ctx))


def _free(bytes_free: int) -> Callable[[Rig], Rig]:
    return lambda rig: Rig(tuple(replace(each, free_bytes=bytes_free) for each in rig.devices), rig.host)


class FirstBoundary(BoundaryMove, frozen=True):
    """A move of the first boundary that leaves a layout without boundaries as it is."""

    def apply(self, layout: Layout) -> Layout:
        return BoundaryMove.apply(self, layout) if len(layout.runs) > 1 else layout


Deed = Callable[[LayoutDocument], None]
boundaries = st.integers(0, N_LAYERS).map(lambda layer: lambda each: each.move(FirstBoundary(0, layer)))
ranges = st.tuples(st.integers(0, N_LAYERS - 1), st.sampled_from(PLACES)).map(
    lambda to: lambda each: each.move(RangeMove(to[0], N_LAYERS - 1, to[1]))
)
gathered = st.sampled_from(PLACES).map(lambda device: lambda each: gather(each, device))
lengths = st.sampled_from((256, 512, 2048)).map(lambda n_ctx: lambda each: _settings(each, n_ctx))
others: tuple[Deed, ...] = (
    lambda each: each.finish_move(),
    lambda each: each.cancel_move(),
    lambda each: each.undo_group.undo(),
    lambda each: each.undo_group.redo(),
    lambda _: QApplication.processEvents(),
)
deeds = st.one_of(boundaries, ranges, gathered, lengths, st.sampled_from(others))
rigs = st.sampled_from((_free(100 * MIB), _free(300 * MIB), lambda _: ALONE, lambda _: RIG))


@given(steps=st.lists(st.tuples(deeds, st.none() | rigs, st.sampled_from((ALWAYS, NEVER))), max_size=12))
@settings(max_examples=examples(60), suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_edits_end_with_the_numbers_of_the_last_one(
    qtbot: QtBot,
    model: ModelFile,
    steps: list[tuple[Deed, Callable[[Rig], Rig] | None, float]],
) -> None:
    rig = RIG
    with pytest.MonkeyPatch.context() as patch, opened(qtbot, model) as document:
        drawn: list[Preview | None] = []
        document.preview_changed.connect(drawn.append)
        for deed, change, direct_s in steps:
            patch.setattr(forecaster, "DIRECT_S", direct_s)
            if change is not None:
                rig = change(RIG)
                document.set_rig(rig)
            else:
                deed(document)
        document.finish_move()
        settle(qtbot, document)
        assert document.preview == right(document, rig)
        assert document.plan is not None
        assert document.plan.edit == document.edit
        assert not drawn or drawn[-1] is document.preview


# ---------------------------------------------------------------------- one after the other


def test_a_layout_is_drawn_at_once_and_its_numbers_follow(document: LayoutDocument, qtbot: QtBot) -> None:
    before = document.preview
    gather(document, "RPC1")
    gather(document, "RPC0")
    assert document.is_behind
    assert document.preview is not None
    assert before is not None
    assert document.preview.layout.devices == ("RPC0",)
    assert document.preview.report == before.report
    settle(qtbot, document)
    assert document.preview == right(document, RIG)


def test_other_settings_leave_the_picture_until_their_numbers_are_here(document: LayoutDocument, qtbot: QtBot) -> None:
    gather(document, "RPC0")
    settle(qtbot, document)
    _settings(document, 1024)
    settle(qtbot, document)
    before, drawn = document.preview, list[Preview | None]()
    document.preview_changed.connect(drawn.append)
    for n_ctx in (2048, 4096, 256):
        _settings(document, n_ctx)
    assert document.preview is before
    settle(qtbot, document)
    # None of those in between is shown: the bar would go back to what people have just changed.
    assert [each.context.n_ctx for each in drawn if each is not None] == [256]


def test_a_drag_shows_what_is_ready(document: LayoutDocument, qtbot: QtBot) -> None:
    gather(document, "RPC0")
    settle(qtbot, document)
    drawn: list[Preview | None] = []
    document.preview_changed.connect(drawn.append)
    for first in range(7, 0, -1):
        document.move(RangeMove(first, N_LAYERS - 1, "RPC1"))
        shown = len(drawn)
        qtbot.waitUntil(lambda shown=shown: len(drawn) > shown)  # type: ignore[misc]
    document.finish_move()
    settle(qtbot, document)
    assert document.preview == right(document, RIG)
    assert document.undo_group.activeStack().count() == 2


def test_who_needs_the_numbers_waits_for_those_of_the_last_edit(document: LayoutDocument, qtbot: QtBot) -> None:
    asked: list[Edit | None] = []

    def look() -> None:
        asked.append(None if document.plan is None else document.plan.edit)

    gather(document, "RPC1")
    document.when_forecast(look)
    gather(document, CPU_ID)
    settle(qtbot, document)
    assert asked == [document.edit]
    document.when_forecast(look)
    assert asked == [document.edit] * 2


def test_what_waits_for_a_model_that_is_put_aside_is_not_done_for_another(
    document: LayoutDocument, model: ModelFile, qtbot: QtBot
) -> None:
    done: list[str] = []
    gather(document, "RPC1")
    document.when_forecast(lambda: done.append("loaded"))
    aside = document.put_aside()
    assert aside is not None
    document.open(model, RIG, aside.edit)
    gather(document, "RPC0")
    settle(qtbot, document)
    assert not done
    document.show(aside, RIG)
    # Its own last picture, until the numbers of its edit are here.
    assert document.preview is not None
    assert document.preview.layout.devices != ("RPC0",)
    settle(qtbot, document)
    assert document.preview == right(document, RIG)
    assert document.edit == aside.edit


def test_a_bug_beside_does_not_end_forecasts(
    document: LayoutDocument, monkeypatch: pytest.MonkeyPatch, qtbot: QtBot
) -> None:
    with monkeypatch.context() as patch, qtbot.captureExceptions() as raised:
        patch.setattr(forecaster, "make_preview", _broken)
        gather(document, "RPC1")
        qtbot.waitUntil(lambda: bool(raised))
    gather(document, "RPC0")
    settle(qtbot, document)
    assert document.preview == right(document, RIG)


def _broken(*_: object) -> Preview:
    raise CancelledError("a bug")


# ---------------------------------------------------------------------- what goes beside


def layouts_of_a_drag(n_steps: int) -> list[Edit]:
    places = [["RPC0"] * first + ["RPC1"] * (N_LAYERS - first) for first in range(1, N_LAYERS)]
    return [Edit(make_layout(N_LAYERS, places[step % len(places)]), ContextSettings()) for step in range(n_steps)]


def test_the_slowest_of_the_last_of_a_kind_decides_and_other_kinds_are_judged_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(forecaster, "DIRECT_S", 0.005)
    pace = Pace()
    *steps, last = layouts_of_a_drag(forecaster.REMEMBERED + 3)
    longer = replace(last, context=ContextSettings(n_ctx=64))
    pace.note(RIG, steps[0], 0.001)
    pace.note(RIG, longer, 0.001)
    pace.note(RIG, steps[0], 0.001)
    pace.note(RIG, steps[1], 0.006)
    for step in steps[2:]:
        assert not pace.is_quick(RIG, step)
        pace.note(RIG, step, 0.004)
    assert pace.is_quick(RIG, longer)
    assert pace.is_quick(RIG, last)


def test_how_long_it_took_is_noted_where_it_is_asked_for(
    document: LayoutDocument, qtbot: QtBot, monkeypatch: pytest.MonkeyPatch
) -> None:
    noted: list[int] = []
    note = Pace.note

    def spy(pace: Pace, rig: Rig, edit: Edit, seconds: float) -> None:
        noted.append(threading.get_ident())
        note(pace, rig, edit, seconds)

    monkeypatch.setattr(Pace, "note", spy)
    gather(document, "RPC1")
    settle(qtbot, document)
    assert noted
    assert set(noted) == {threading.get_ident()}


def test_a_kind_that_was_never_done_is_judged_by_all_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forecaster, "DIRECT_S", 0.005)
    first, second, third = layouts_of_a_drag(3)
    large = Pace(first_s=0.5)
    assert large.is_quick(RIG, first)
    large.note(RIG, first, 0.001)
    assert not large.is_quick(RIG, second)
    assert not large.is_quick(ALONE, first)
    large.note(RIG, second, 0.002)
    assert large.is_quick(RIG, third)
    small = Pace(first_s=0.004)
    small.note(RIG, first, 0.001)
    assert small.is_quick(RIG, second)
    assert small.is_quick(ALONE, first)


def test_a_layout_of_a_large_model_that_is_begun_anew_is_drawn_with_what_is_known_of_it(
    document: LayoutDocument, model: ModelFile, qtbot: QtBot
) -> None:
    gather(document, "RPC1")
    settle(qtbot, document)
    document.restart(RIG, Edit(make_layout(N_LAYERS, [CPU_ID] * N_LAYERS), ContextSettings(n_ctx=512)))
    assert document.is_behind
    settle(qtbot, document)
    assert document.preview == right(document, RIG)

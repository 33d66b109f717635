"""Several models with the real engine: loaded together, replaced, idle, lost and closed."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

import psutil
import pytest
from pytestqt.qtbot import QtBot

from app.models.open_model import OpenModel
from app.notices import Notice
from app.paths import calibration_path
from app.settings import Settings
from app.wiring import Desk, make_desk
from engine.base.units import MIB
from engine.devices.device import CPU_ID
from engine.model.gguf.model_file import identify
from engine.model.gguf.reader import read_model
from engine.planning.layout.engine_parameters import used_devices
from engine.planning.layout.layout import single_device
from engine.planning.plan.edit import Edit
from engine.planning.settings.context_settings import ContextSettings
from engine.runtime.session.status import ModelStatus, Phase
from tests.support.models import write_tiny_llama
from widgets.devices.limits import DeviceLimits
from widgets.library.load_question import LoadChoice, LoadDecision, LoadQuestion

N_LAYERS = 4
CONTEXT = ContextSettings(n_ctx=512, threads=1, threads_batch=1)
LONG = ContextSettings(n_ctx=65_536, threads=1, threads_batch=1)
"""An answer that nobody stops goes on for far longer than any of these tests."""


class Clock:
    """Time that passes when it is told to."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


class Bench:
    """A desk without a window, what it told, and the two models of these tests."""

    def __init__(self, qtbot: QtBot, desk: Desk, clock: Clock, folder: Path) -> None:
        self.desk = desk
        self.clock = clock
        self.notices: list[Notice] = []
        self.questions: list[LoadQuestion | None] = []
        self.waits: list[str] = []
        self._qtbot = qtbot
        self._paths = {
            name: write_tiny_llama(folder / f"{name}.gguf", n_layers=N_LAYERS, seed=seed, n_ctx_train=1 << 17)
            for seed, name in enumerate(("ada", "bob"))
        }
        desk.notices.given.connect(self.notices.append)
        desk.loader.question_changed.connect(self.questions.append)
        for model in desk.models.all:
            self._follow(model)
        desk.models.added.connect(self._follow)

    def _follow(self, model: OpenModel) -> None:
        def note(status: ModelStatus) -> None:
            if status.waits:
                self.waits.append(status.waits)

        model.status_changed.connect(note)

    def path(self, name: str) -> Path:
        """The file of one of the two models."""
        return self._paths[name]

    def wait(self, condition: Callable[[], bool]) -> None:
        self._qtbot.waitUntil(condition)

    def start_lab(self, caps_bytes: Sequence[int]) -> None:
        self.desk.rig.lab.start(caps_bytes)
        self.wait(lambda: len(self.desk.rig.live.rig.devices) == len(caps_bytes))

    def open(self, name: str, device: str = CPU_ID, context: ContextSettings = CONTEXT) -> OpenModel:
        """Make a model current, and put all of it on one device."""
        self.desk.opener.open(self._paths[name])
        self.wait(lambda: self.desk.models.current.name == name)
        self.desk.document.replace(Edit(single_device(N_LAYERS, device), context), "test")
        return self.desk.models.current

    def load(self, name: str, device: str = CPU_ID, context: ContextSettings = CONTEXT) -> OpenModel:
        model = self.open(name, device, context)
        self.desk.loader.load()
        self.wait_for(model, Phase.READY)
        return model

    def wait_for(self, model: OpenModel, state: Phase) -> None:
        self.wait(lambda: model.loading.phase is state)

    def answer_of(self, model: OpenModel) -> str:
        """Ask something and return the answer."""
        model.conversation.send("hello")
        assert model.loading.phase is Phase.ANSWERING
        # The model is ready before the last text has arrived in the conversation.
        self.wait(lambda: model.loading.phase is Phase.READY and not model.conversation.is_answering)
        return model.conversation.tree.path[-1].content

    @property
    def loaded_names(self) -> list[str]:
        return [held.name for held in self.desk.models.held]


@pytest.fixture
def bench(qtbot: QtBot, tmp_path: Path) -> Iterator[Bench]:
    # what loads of other tests took beside their buffers, and the first load here unlearns, would be room for both
    calibration_path().unlink(missing_ok=True)
    clock = Clock()
    desk = make_desk(Settings(tmp_path / "settings.ini"), clock=clock)
    desk.prober.close()
    desk.document.edit_settled.disconnect()  # No probes: the processes here are workers and models.
    yield Bench(qtbot, desk, clock, tmp_path)
    desk.close()
    assert not children(), [each.cmdline() for each in children()]


def children() -> set[psutil.Process]:
    return set(psutil.Process(os.getpid()).children(recursive=True))


def own_children() -> set[psutil.Process]:
    """Workers and models; a model that answers has a process for its template beside it."""
    return set(psutil.Process(os.getpid()).children())


def child_of(load: Callable[[], OpenModel]) -> tuple[OpenModel, psutil.Process]:
    """Return what `load` loaded with its process; lab workers are there before."""
    before = own_children()
    model = load()
    (child,) = own_children() - before
    return model, child


# ---------------------------------------------------------------------- beside each other


def test_two_models_on_two_workers_answer_at_the_same_time(bench: Bench) -> None:
    bench.start_lab([128 * MIB, 128 * MIB])
    ada = bench.load("ada", "RPC0", LONG)
    bob = bench.load("bob", "RPC1", LONG)
    assert bench.questions == []
    ada.conversation.send("go on")
    bob.conversation.send("go on")
    assert ada.loading.phase is bob.loading.phase is Phase.ANSWERING
    for model in (ada, bob):
        model.loading.stop_answer()
        bench.wait_for(model, Phase.READY)
    assert [set(held.held_bytes) - {CPU_ID} for held in bench.desk.models.held] == [{"RPC0"}, {"RPC1"}]
    assert {held.name: len(held.endpoints) for held in bench.desk.models.held} == {"ada": 1, "bob": 1}


def test_each_model_keeps_its_conversation_and_its_edit(bench: Bench) -> None:
    ada, bob = bench.load("ada"), bench.load("bob")
    first = bench.answer_of(ada)
    assert bench.answer_of(bob) != first
    desk = bench.desk
    desk.document.replace(Edit(single_device(N_LAYERS, CPU_ID), ContextSettings(n_ctx=256)), "edit bob")
    desk.opener.show(ada)
    assert desk.document.model is ada.file
    assert not desk.is_edited
    assert desk.models.current.conversation is ada.conversation
    desk.opener.show(bob)
    assert desk.is_edited
    desk.document.undo_group.undo()
    assert not desk.is_edited


def is_answered(model: OpenModel) -> bool:
    """The end of an answer is kept before it is shown."""
    return model.conversation.tree.path[-1].state == "done"


def test_the_same_file_is_open_twice_with_two_layouts(bench: Bench) -> None:
    bench.start_lab([128 * MIB, 128 * MIB])
    desk = bench.desk
    first = bench.load("ada", "RPC0")
    desk.opener.open_again()
    bench.wait(lambda: desk.models.current is not first)
    second = desk.models.current
    assert (first.name, second.name) == ("ada", "(2) ada")
    assert desk.document.model is not None
    assert desk.document.model.name == "(2) ada"
    assert [each.title for each in desk.settings.recent_models] == ["ada"]
    desk.document.replace(Edit(single_device(N_LAYERS, "RPC1"), CONTEXT), "test")
    preview = desk.document.preview
    assert preview is not None
    assert preview.report.fits
    (worker,) = [device for device in desk.document.plan.rig.devices if device.id == "RPC0"]  # type: ignore[union-attr]
    assert [holding.model for holding in worker.holdings] == ["ada"]
    desk.loader.load()
    bench.wait_for(second, Phase.READY)
    assert [(held.name, set(held.held_bytes) - {CPU_ID}) for held in desk.models.held] == [
        ("ada", {"RPC0"}),
        ("(2) ada", {"RPC1"}),
    ]
    for model in (first, second):
        bench.answer_of(model)
        bench.wait(partial(is_answered, model))
    # the file itself leads to the first one, and each keeps its edit
    desk.opener.open(first.file.paths[0])  # type: ignore[union-attr]
    bench.wait(lambda: desk.models.current is first)
    assert desk.document.edit is not None
    assert used_devices(desk.document.edit.layout) == {"RPC0"}
    desk.unloader.unload(first)
    assert bench.loaded_names == ["(2) ada"]
    assert second.loading.phase is Phase.READY


def test_several_files_are_opened_one_beside_the_other(bench: Bench, tmp_path: Path) -> None:
    desk = bench.desk
    missing = tmp_path / "missing.gguf"
    desk.opener.open_all([bench.path("ada"), missing, bench.path("bob")])
    bench.wait(lambda: desk.models.current.name == "bob")
    assert [model.name for model in desk.models.all] == ["ada", "bob"]
    assert any("missing.gguf" in notice.text for notice in bench.notices)
    desk.opener.show(desk.models.all[0])
    assert desk.document.model is desk.models.all[0].file


def test_a_load_ends_the_probe_that_would_be_in_its_way(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    ada = bench.open("ada")
    states: list[Phase] = []
    monkeypatch.setattr(bench.desk.prober, "cancel", lambda: states.append(ada.loading.phase))
    bench.desk.loader.load()
    assert states == [Phase.LOADING]
    bench.wait_for(ada, Phase.READY)


def test_another_layout_of_a_loaded_model_replaces_only_that_one(bench: Bench) -> None:
    ada = bench.load("ada")
    bench.load("bob")
    assert bench.load("ada", context=ContextSettings(n_ctx=256)) is ada
    assert ada.loading.loaded is not None
    assert ada.loading.loaded.edit.context.n_ctx == 256
    assert bench.loaded_names == ["ada", "bob"]
    loaded = ada.loading.loaded
    bench.desk.loader.load()
    assert ada.loading.phase is Phase.READY
    assert ada.loading.loaded is loaded


def test_a_load_that_waits_for_an_answer_begins_when_the_answer_fails(bench: Bench) -> None:
    ada = bench.load("ada", context=LONG)
    lost: list[object] = []
    ada.loading.request_lost.connect(lost.append)
    ada.conversation.send("hello")
    bench.open("ada", context=CONTEXT)
    (child,) = own_children()
    child.suspend()  # It is to fail before it has stopped.
    bench.desk.loader.load()
    assert ada.loading.phase is Phase.LOADING
    pending = ada.loading.snapshot.pending
    assert pending is not None
    assert pending.waits == "an answer is being stopped"
    child.kill()
    bench.wait(lambda: bool(lost))
    bench.wait_for(ada, Phase.READY)
    assert ada.loading.loaded is not None
    assert ada.loading.loaded.edit.context == CONTEXT


def test_only_one_model_is_loaded_at_a_time(bench: Bench) -> None:
    ada = bench.open("ada")
    bench.desk.loader.load()
    bob = bench.open("bob")
    if ada.loading.phase is Phase.LOADING:
        bench.desk.loader.load()
        assert "ada is being loaded" in bench.notices[-1].text
    bench.wait_for(ada, Phase.READY)
    bench.desk.loader.load()
    bench.wait_for(bob, Phase.READY)


# ---------------------------------------------------------------------- in each other's place


def test_a_worker_that_is_in_use_is_named_and_its_model_can_go(bench: Bench) -> None:
    bench.start_lab([128 * MIB])
    ada = bench.load("ada", "RPC0")
    bench.clock.now_s += 200
    bob = bench.open("bob", "RPC0")
    preview = bench.desk.document.preview
    assert preview is not None
    assert [each.rule for each in preview.report.advice] == ["worker_in_use"]
    bench.desk.loader.load()
    (question,) = bench.questions
    assert question is not None
    assert question.text.startswith("bob needs RPC0, which ada (idle for 3 min) is using.")
    assert question.without_unload_text == ""
    bench.desk.loader.answer(LoadChoice(LoadDecision.CANCEL))
    assert bench.loaded_names == ["ada"]
    bench.desk.loader.load()
    bench.desk.loader.answer(LoadChoice(LoadDecision.UNLOAD))
    bench.wait_for(bob, Phase.READY)
    assert ada.loading.phase is Phase.STOPPED
    assert bench.answer_of(bob)


def test_the_next_load_waits_until_the_memory_of_the_last_one_is_back(bench: Bench) -> None:
    memory = bench.desk.rig.live.memory
    bench.desk.rig.start()
    bench.start_lab([128 * MIB])
    ada = bench.load("ada", "RPC0", LONG)
    assert ada.held is not None
    held_bytes = ada.held.held_bytes["RPC0"]
    bench.wait(lambda: memory.free_bytes.get("RPC0", 128 * MIB) < 128 * MIB - held_bytes // 2)
    bob = bench.open("bob", "RPC0")
    bench.desk.loader.load()
    bench.desk.loader.answer(LoadChoice(LoadDecision.UNLOAD))
    assert bench.waits == ["Waiting until the memory of RPC0 is free again"]
    assert bench.desk.loader.is_waiting
    bench.wait_for(bob, Phase.READY)
    assert memory.free_bytes["RPC0"] > 128 * MIB - held_bytes // 2


def make_room_for_one(bench: Bench, context: ContextSettings = CONTEXT) -> None:
    """Give the host a cap that holds either model, not both."""
    bench.open("ada", context=context)
    preview = bench.desk.document.preview
    assert preview is not None
    need_bytes = preview.report.rows[-1].need_bytes
    bench.desk.rig.search.set_limits(DeviceLimits(CPU_ID, need_bytes * 3 // 2, 0))


def test_a_model_that_does_not_fit_beside_another_asks(bench: Bench) -> None:
    make_room_for_one(bench)
    ada = bench.load("ada")
    bob = bench.open("bob")
    preview = bench.desk.document.preview
    assert preview is not None
    assert not preview.report.fits
    bench.desk.loader.load()
    assert bench.questions[-1] is not None
    assert bench.questions[-1].text.startswith("bob does not fit together with ada (idle): ")
    bench.desk.loader.answer(LoadChoice(LoadDecision.BESIDE))
    bench.wait_for(bob, Phase.READY)
    assert bench.loaded_names == ["ada", "bob"]
    bench.desk.unloader.unload(bob)
    bench.desk.loader.load()
    bench.desk.loader.answer(LoadChoice(LoadDecision.UNLOAD, remember=True))
    bench.wait_for(bob, Phase.READY)
    assert bench.loaded_names == ["bob"]
    asked = len(bench.questions)
    bench.load("ada")
    assert bench.loaded_names == ["ada"]
    assert len(bench.questions) == asked
    assert ada.loading.phase is Phase.READY


def test_an_answer_is_never_ended_unasked(bench: Bench) -> None:
    make_room_for_one(bench, LONG)
    bench.desk.settings.without_room = LoadDecision.UNLOAD
    ada = bench.load("ada", context=LONG)
    ada.conversation.send("go on")
    bench.open("bob", context=LONG)
    bench.desk.loader.load()
    question = bench.questions[-1]
    assert question is not None
    assert "ada (answering)" in question.text
    assert question.text.endswith("The answer that ada is writing would be stopped.")
    assert not question.can_remember
    assert "ada" in bench.loaded_names


def test_an_edit_takes_the_question_back(bench: Bench) -> None:
    make_room_for_one(bench)
    bench.load("ada")
    bench.open("bob")
    bench.desk.loader.load()
    bench.desk.document.set_context(ContextSettings(n_ctx=256))
    assert bench.questions[-1] is None
    bench.desk.loader.answer(LoadChoice(LoadDecision.UNLOAD))
    assert bench.loaded_names == ["ada"]


def test_another_file_takes_the_question_back(bench: Bench, tmp_path: Path) -> None:
    make_room_for_one(bench)
    bench.load("ada")
    bob = bench.open("bob")
    bench.desk.loader.load()
    assert bench.questions[-1] is not None
    carl = read_model(write_tiny_llama(tmp_path / "carl.gguf", n_layers=N_LAYERS, seed=2))
    # A blank model is replaced, so the open model is the same; the edit is equal.
    document = bench.desk.document
    assert document.edit is not None
    assert bench.desk.models.place(carl, identify(carl.paths)) is bob
    document.open(carl, bench.desk.rig.live.rig, document.edit)
    assert bench.questions[-1] is None


# ---------------------------------------------------------------------- idle, lost, closed


def test_a_question_goes_on_without_the_model_that_was_lost_meanwhile(bench: Bench) -> None:
    bench.start_lab([64 * MIB] * 2)
    bench.load("ada", "RPC0")
    bob, process = child_of(lambda: bench.load("bob", "RPC1"))
    layout = single_device(N_LAYERS, "RPC0").move_range(2, 3, "RPC1")
    bench.desk.document.replace(Edit(layout, CONTEXT), "both workers")
    bench.desk.loader.load()
    bench.wait(lambda: bool(bench.questions))
    process.kill()
    bench.wait_for(bob, Phase.STOPPED)
    question = bench.questions[-1]
    assert question is not None
    assert question.text.startswith("bob needs RPC0, which ada")


def test_an_idle_model_goes_when_its_keep_alive_is_over(bench: Bench) -> None:
    ada, bob = bench.load("ada"), bench.load("bob")
    ada.keep_alive(300)
    bench.clock.now_s += 299
    bench.desk.models.unload_expired()
    assert bench.loaded_names == ["ada", "bob"]
    bench.answer_of(ada)
    bench.clock.now_s += 299
    bench.desk.models.unload_expired()
    assert bench.loaded_names == ["ada", "bob"]
    bench.clock.now_s += 1
    bench.desk.models.unload_expired()
    assert bench.loaded_names == ["bob"]
    assert "Unloaded ada" in bench.notices[-1].text
    bob.keep_alive(0)
    bench.clock.now_s += 1000
    bench.desk.models.unload_expired()
    assert bench.loaded_names == ["bob"]
    bob.conversation.send("hello")
    bench.wait(lambda: bench.loaded_names == [])


def test_a_keep_alive_may_be_longer_than_a_float_in_milliseconds(bench: Bench) -> None:
    model = bench.load("ada")
    told: list[None] = []
    bench.desk.models.changed.connect(lambda: told.append(None))
    model.keep_alive(1e306)
    assert told


def test_a_model_whose_process_is_lost_leaves_the_other_alone(bench: Bench) -> None:
    ada, child = child_of(lambda: bench.load("ada"))
    bob = bench.load("bob")
    endings: list[object] = []
    ada.loading.ended.connect(endings.append)
    child.kill()
    bench.wait(lambda: bool(endings))
    assert ada.loading.phase is Phase.STOPPED
    assert len(endings) == 1
    assert bench.loaded_names == ["bob"]
    assert bench.answer_of(bob)


def test_the_lab_takes_only_its_own_model_along(bench: Bench) -> None:
    bench.start_lab([128 * MIB])
    ada, bob = bench.load("ada", "RPC0"), bench.load("bob")
    bench.desk.unloader.stop_lab()
    assert bench.loaded_names == ["bob"]
    assert ada.loading.phase is Phase.STOPPED
    assert bench.answer_of(bob)


def test_a_cancelled_load_leaves_the_other_alone(bench: Bench) -> None:
    bench.load("ada")
    bob, child = bench.open("bob"), own_children()
    bench.desk.loader.load()
    bench.wait(lambda: bool(own_children() - child))
    bench.desk.loader.cancel()
    bench.wait(lambda: bob.loading.phase in (Phase.STOPPED, Phase.READY))
    assert bench.loaded_names[0] == "ada"


def test_all_of_them_end_with_the_window(bench: Bench) -> None:
    bench.start_lab([128 * MIB])
    bench.load("ada", "RPC0", LONG).conversation.send("go on")
    bench.load("bob")
    assert len(own_children()) == 3
    bench.desk.close()
    assert children() == set()


def test_a_model_unloaded_in_the_middle_of_an_answer_can_be_loaded_again_at_once(bench: Bench) -> None:
    ada = bench.load("ada", context=LONG)
    ada.conversation.send("go on")
    assert ada.loading.phase is Phase.ANSWERING
    bench.desk.unloader.unload_current()
    assert ada.loading.loaded is None
    bench.desk.loader.load()
    bench.wait_for(ada, Phase.READY)
    assert bench.loaded_names == ["ada"]

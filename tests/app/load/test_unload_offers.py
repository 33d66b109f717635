"""Unloading idle models before a load: offer, preference, layouts for the freed memory, plans of several models.

With the real engine and a lab worker, which serves one model at a time.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from pytestqt.qtbot import QtBot

from app.load import unload_offers
from app.load.several import SeveralPlanned
from app.models.open_model import OpenModel
from app.models.replanner import Replanner, has_moved
from app.settings import Settings
from app.wiring import Desk, make_desk
from engine.base.units import GIB, MIB
from engine.base.values import replace
from engine.devices.device import CPU_ID
from engine.planning.fit.unload_plan import find_whole
from engine.planning.layout.layout import single_device
from engine.runtime.session.status import Phase
from tests.support.models import write_tiny_llama
from tests.support.patience import DEADLINE_S
from tests.support.previews import make_gpu, make_rig
from widgets.library.load_question import LoadDecision
from widgets.library.unload_offer import UnloadOffer

N_LAYERS = 4
NEVER_MS = 1 << 30


class Bench:
    """A desk without a window on one lab worker, with the models ada and bob."""

    def __init__(self, qtbot: QtBot, desk: Desk, folder: Path) -> None:
        self.desk, self._qtbot = desk, qtbot
        self.offers: list[UnloadOffer | None] = []
        self.paths = {
            name: write_tiny_llama(folder / f"{name}.gguf", n_layers=N_LAYERS, seed=seed)
            for seed, name in enumerate(("ada", "bob"))
        }
        self.notices: list[str] = []
        desk.unload_offers.offer_changed.connect(self.offers.append)
        desk.notices.given.connect(lambda notice: self.notices.append(notice.text))
        desk.rig.lab.start([256 * MIB])
        qtbot.waitUntil(lambda: len(desk.rig.live.rig.devices) == 1)

    def open(self, name: str) -> OpenModel:
        with self._qtbot.waitSignal(self.desk.opener.model_changed):
            self.desk.opener.open(self.paths[name])
        return self.desk.models.current

    def load(self, name: str) -> OpenModel:
        model = self.open(name)
        self.wait_for_layout("RPC0")
        self.desk.loader.load()
        self._qtbot.waitUntil(lambda: model.loading.phase is Phase.READY)
        return model

    def wait(self, is_so: Callable[[], bool]) -> None:
        self._qtbot.waitUntil(is_so)

    def settle(self) -> None:
        """Let the memory be taken for settled, as after `SETTLE_MS`."""
        replanner = self.desk.models.findChild(Replanner)
        assert isinstance(replanner, Replanner)
        self.wait(lambda: not self.desk.document.is_behind)
        replanner._on_settled()

    def wait_for_layout(self, device: str) -> None:
        """Wait until all layers of the shown model are on a device."""

        def is_there() -> bool:
            edit = self.desk.document.edit
            return edit is not None and edit.layout.devices == (device,)

        self._qtbot.waitUntil(is_there)

    def wait_for_offer(self) -> UnloadOffer:
        self._qtbot.waitUntil(lambda: bool(self.offers) and self.offers[-1] is not None)
        offer = self.offers[-1]
        assert offer is not None
        return offer


@pytest.fixture
def bench(qtbot: QtBot, tmp_path: Path) -> Iterator[Bench]:
    desk = make_desk(Settings(tmp_path / "settings.ini"))
    desk.prober.close()
    desk.document.edit_settled.disconnect()  # No probes: the processes here are workers and models.
    yield Bench(qtbot, desk, tmp_path)
    desk.close()


def test_one_click_parks_the_idle_model_and_loads_the_other_in_its_place(bench: Bench, qtbot: QtBot) -> None:
    ada = bench.load("ada")
    bob = bench.open("bob")
    bench.wait_for_layout(CPU_ID)
    offer = bench.wait_for_offer()
    assert offer.text == "This model fits wholly on RPC0 if ada is unloaded."
    assert offer.unload_text == "Unload ada"
    bench.desk.unload_offers.accept_and_load()
    qtbot.waitUntil(lambda: bob.loading.phase is Phase.READY)
    assert ada.is_parked
    assert bob.held is not None
    assert "RPC0" in bob.held.held_bytes
    assert bench.offers[-1] is None
    assert bench.desk.document.is_untouched, "the layout was found, not edited"


def test_the_preference_decides(bench: Bench, qtbot: QtBot) -> None:
    settings = bench.desk.settings
    settings.without_room = LoadDecision.BESIDE
    ada = bench.load("ada")
    bob = bench.open("bob")
    bench.wait_for_layout(CPU_ID)
    bench.desk.unload_offers._search()
    assert not any(bench.offers), "models are planned around idle ones"
    settings.without_room = LoadDecision.UNLOAD
    bench.desk.unload_offers._search()
    bench.wait_for_offer()
    bench.desk.loader.load()
    qtbot.waitUntil(lambda: bob.loading.phase is Phase.READY)
    assert ada.is_parked
    assert bench.desk.document.edit is not None
    assert bench.desk.document.edit.layout.devices == ("RPC0",)


def test_an_untouched_layout_follows_the_memory_and_a_touched_one_stays(bench: Bench, qtbot: QtBot) -> None:
    ada = bench.load("ada")
    bench.open("bob")
    bench.wait_for_layout(CPU_ID)
    bench.desk.unloader.unload(ada)
    bench.wait_for_layout("RPC0")
    bench.desk.document.set_layout(single_device(N_LAYERS, CPU_ID), "by hand")
    begun: list[str] = []
    bench.desk.background.busy_changed.connect(begun.append)
    bench.desk.layouts.follow_memory()
    assert "Proposing a layout" not in begun
    bench.wait_for_layout(CPU_ID)
    bench.desk.document.undo_group.undo()
    bench.wait_for_layout("RPC0")


def test_small_movements_of_memory_are_noise() -> None:
    card = make_gpu("CUDA0", 24)
    rig = make_rig(card)
    before = {"CUDA0": card.available_bytes}

    def moved(size_bytes: int) -> bool:
        changed = replace(card, free_bytes=card.available_bytes - size_bytes)
        return has_moved(replace(rig, devices=(changed,)), before)

    assert not moved(0)
    assert not moved(700 * MIB)
    assert moved(GIB)
    assert moved(-GIB)


def test_several_models_are_loaded_one_after_another(bench: Bench, qtbot: QtBot) -> None:
    desk, paths = bench.desk, tuple(bench.paths.values())
    with qtbot.waitSignal(desk.several.planned) as blocker:
        desk.several.plan(paths)
    planned = blocker.args[0]
    assert isinstance(planned, SeveralPlanned)
    assert planned.found.fits
    # A worker serves one model: the other one is on the CPU.
    devices = [each.plan.edit.layout.devices for each in planned.found.placed]
    assert devices == [("RPC0",), (CPU_ID,)]
    desk.several.load(planned)
    qtbot.waitUntil(lambda: [model.loading.phase for model in desk.models.all] == [Phase.READY, Phase.READY])
    held = {model.name: set(model.held.held_bytes) - {CPU_ID} for model in desk.models.all if model.held}
    assert held == {"ada": {"RPC0"}, "bob": set()}
    assert not any(model.status.is_edited for model in desk.models.all)


def test_a_file_that_cannot_be_read_is_told(bench: Bench, qtbot: QtBot, tmp_path: Path) -> None:
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(b"GGUF")
    with qtbot.waitSignal(bench.desk.several.refused) as refused:
        bench.desk.several.plan((bench.paths["ada"], broken))
    assert "broken.gguf" in refused.args[0]


def test_a_layout_found_before_memory_came_back_is_found_again(bench: Bench) -> None:
    ada = bench.load("ada")
    bench.desk.opener.open(bench.paths["bob"])
    # The file is read and planned for the memory that ada holds; until it is shown, that is free again.
    bench.desk.unloader.unload(ada)
    bench.wait(lambda: bench.desk.models.current.name == "bob")
    bench.wait_for_layout("RPC0")


def test_a_loaded_model_is_planned_for_the_memory_of_the_time_when_it_is_unloaded(bench: Bench) -> None:
    ada = bench.load("ada")
    bob = bench.open("bob")
    bench.wait_for_layout(CPU_ID)
    bench.desk.loader.load()
    bench.wait(lambda: bob.loading.phase is Phase.READY)
    bench.desk.unloader.unload(ada)
    bench.settle()
    bench.wait_for_layout(CPU_ID)
    bench.desk.unloader.unload(bob)
    bench.wait_for_layout("RPC0")


def test_a_parked_model_keeps_the_layout_for_which_it_has_to_ask(bench: Bench) -> None:
    """Its question must not load it on the CPU without a word, because another model has its device now."""
    ada = bench.load("ada")
    bench.open("bob")
    bench.wait_for_offer()
    bench.desk.unload_offers.accept_and_load()
    bench.wait(lambda: bench.desk.models.current.loading.phase is Phase.READY)
    bench.desk.opener.show(ada)
    assert ada.is_parked
    questions: list[object] = []
    bench.desk.loader.question_changed.connect(questions.append)
    bench.settle()
    bench.wait_for_layout("RPC0")
    bench.desk.loader.load()
    bench.wait(lambda: bool(questions))
    assert questions[-1] is not None
    assert ada.loading.phase is Phase.STOPPED
    bench.desk.settings.without_room = LoadDecision.BESIDE
    bench.settle()
    bench.wait_for_layout(CPU_ID)


def test_an_offer_for_other_devices_does_nothing(bench: Bench) -> None:
    ada = bench.load("ada")
    bench.open("bob")
    bench.wait_for_offer()
    live = bench.desk.rig.live
    live.set_devices(replace(live.devices, rig=replace(live.rig, devices=(*live.rig.devices, make_gpu("CUDA9", 1)))))
    bench.desk.unload_offers.accept_and_load()
    assert ada.loading.phase is Phase.READY
    assert bench.offers[-1] is None


def test_an_offer_that_was_found_for_one_model_is_not_made_to_another_one(
    bench: Bench, qtbot: QtBot, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both models have the same edit, and the search ends after the other model is shown."""
    offers, found, may_end = bench.desk.unload_offers, list[object](), threading.Event()

    def find_slowly(*arguments: Any) -> object:
        found.append(find_whole(*arguments))
        assert may_end.wait(DEADLINE_S)
        return found[0]

    offers._timer.setInterval(NEVER_MS)  # The test searches by itself.
    bench.paths["eve"] = write_tiny_llama(tmp_path / "eve.gguf", n_layers=N_LAYERS, seed=2)
    bench.load("ada")
    eve = bench.open("eve")
    bench.wait_for_layout(CPU_ID)
    with qtbot.waitSignal(bench.desk.opener.model_changed):
        bench.desk.opener.open(bench.paths["bob"], keep_current=True)
    bob = bench.desk.models.current
    bench.wait_for_layout(CPU_ID)
    bench.wait(lambda: not bench.desk.document.is_behind)
    monkeypatch.setattr(unload_offers, "find_whole", find_slowly)
    offers._search()
    bench.wait(lambda: bool(found))
    edit = bench.desk.document.edit
    bench.desk.opener.show(eve)
    assert bench.desk.models.current is eve
    assert bench.desk.document.edit == edit
    may_end.set()
    bench.wait(lambda: not offers._searching.is_running)
    assert found[0] is not None
    assert not any(bench.offers)
    bench.desk.opener.show(bob)
    bench.wait(lambda: not bench.desk.document.is_behind)
    offers._search()
    bench.wait_for_offer()


def test_an_offer_is_looked_for_again_when_other_programs_take_the_memory(bench: Bench) -> None:
    bench.load("ada")
    bench.open("bob")
    bench.wait_for_offer()
    live = bench.desk.rig.live
    (worker,) = live.devices.rig.devices
    full = replace(worker, cap_bytes=MIB)
    live.set_devices(replace(live.devices, rig=replace(live.devices.rig, devices=(full,))))
    bench.wait(lambda: bench.offers[-1] is None)


def plan_both(bench: Bench) -> SeveralPlanned:
    planned: list[SeveralPlanned] = []
    bench.desk.several.planned.connect(planned.append)
    bench.desk.several.plan(tuple(bench.paths.values()))
    bench.wait(lambda: bool(planned))
    return planned[0]


def test_no_model_of_a_plan_is_unloaded_for_the_next_one(bench: Bench) -> None:
    planned = plan_both(bench)
    ada, bob = planned.found.placed
    # As if bob were to go on the device that ada has.
    wrong = replace(bob, plan=bob.plan.with_layout(single_device(N_LAYERS, "RPC0")))
    bench.desk.several.load(replace(planned, found=replace(planned.found, placed=(ada, wrong))))
    bench.wait(
        lambda: any("bob was not loaded, because another model uses RPC0 now." in each for each in bench.notices)
    )
    assert [held.name for held in bench.desk.models.held] == ["ada"]


def test_a_chosen_model_that_answers_is_planned_once_and_not_interrupted(bench: Bench) -> None:
    ada = bench.load("ada")
    planned = plan_both(bench)
    ada.conversation.send("go on")
    bench.desk.several.load(planned)
    assert ada.loading.phase is Phase.ANSWERING
    assert bench.notices[-1] == "ada is answering. Wait for the answer or stop it, then load all models."
    # The memory that its own load gives back is free for it.
    assert plan_both(bench).found.find("ada").plan.edit.layout.devices == ("RPC0",)


def test_a_hand_made_layout_of_a_model_in_the_background_comes_back_by_undo(bench: Bench) -> None:
    desk = bench.desk
    bob = bench.open("bob")
    bench.wait_for_layout("RPC0")
    by_hand = single_device(N_LAYERS, CPU_ID).move_range(3, 3, "RPC0")
    desk.document.set_layout(by_hand, "by hand")
    desk.opener.open(bench.paths["ada"], keep_current=True)
    bench.wait(lambda: desk.models.current.name == "ada")
    assert bob.edit_state is not None
    desk.several.load(plan_both(bench))
    bench.wait(lambda: len(desk.models.held) == 2 and desk.models.loading is None)
    desk.opener.show(bob)
    bench.wait_for_layout(CPU_ID)
    desk.document.undo_group.undo()
    assert desk.document.edit is not None
    assert desk.document.edit.layout == by_hand

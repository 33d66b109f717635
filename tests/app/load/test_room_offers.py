"""Idle models make room: the offer, its preference, layouts that follow the memory, and several models planned at once.

With the real engine and a lab worker, which serves one model at a time.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from pytestqt.qtbot import QtBot

from app.load.several import SeveralPlanned
from app.models.open_model import OpenModel
from app.models.replanner import has_moved
from app.settings import Settings
from app.wiring import Desk, make_desk
from engine.base.units import GIB, MIB
from engine.devices.device import CPU_ID
from engine.planning.layout.layout import single_device
from engine.runtime.session.status import Phase
from tests.support.models import write_tiny_llama
from tests.support.previews import make_gpu, make_rig
from widgets.library.load_question import LoadAnswer
from widgets.library.room_offer import RoomOffer

N_LAYERS = 4


class Bench:
    """A desk without a window on one lab worker, with the models ada and bob."""

    def __init__(self, qtbot: QtBot, desk: Desk, folder: Path) -> None:
        self.desk, self._qtbot = desk, qtbot
        self.offers: list[RoomOffer | None] = []
        self.paths = {
            name: write_tiny_llama(folder / f"{name}.gguf", n_layers=N_LAYERS, seed=seed)
            for seed, name in enumerate(("ada", "bob"))
        }
        desk.room_offers.offer_changed.connect(self.offers.append)
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

    def wait_for_layout(self, device: str) -> None:
        """Wait until all layers of the shown model are on a device."""

        def is_there() -> bool:
            edit = self.desk.document.edit
            return edit is not None and edit.layout.devices == (device,)

        self._qtbot.waitUntil(is_there)

    def wait_for_offer(self) -> RoomOffer:
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
    assert offer.text == "Fits wholly on RPC0 if ada is unloaded."
    assert offer.unload_text == "Unload ada"
    bench.desk.room_offers.accept_and_load()
    qtbot.waitUntil(lambda: bob.loading.phase is Phase.READY)
    assert ada.is_parked
    assert bob.held is not None
    assert "RPC0" in bob.held.held_bytes
    assert bench.offers[-1] is None
    assert bench.desk.document.is_untouched, "the layout was found, not edited"


def test_the_preference_decides(bench: Bench, qtbot: QtBot) -> None:
    settings = bench.desk.settings
    settings.without_room = LoadAnswer.BESIDE
    ada = bench.load("ada")
    bob = bench.open("bob")
    bench.wait_for_layout(CPU_ID)
    bench.desk.room_offers._search()
    assert not any(bench.offers), "models are planned around idle ones"
    settings.without_room = LoadAnswer.UNLOAD
    bench.desk.room_offers._search()
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

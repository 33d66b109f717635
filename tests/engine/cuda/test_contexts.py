"""CUDA contexts: the commands that create one, on which cards, and that its bytes are counted once."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from engine.base.units import MIB
from engine.planning.memory.backends import TRAITS
from tests.engine.cuda.cards import BLOCK_BYTES
from tests.engine.cuda.conftest import CONTEXT_MIB, Cards
from tests.engine.cuda.layouts import layout_file
from tests.support.command_line import run_cli
from tests.support.patience import DEADLINE_S

pytestmark = pytest.mark.engine("cuda")

SIZES_MIB = {"CUDA0": 24576, "CUDA1": 24576, "CUDA2": 12288, "CUDA3": 64}


def listed(kind: Callable[[int], int] = lambda size: size >> 20) -> dict[str, tuple[int, int]]:
    """Return total and free memory of each card in MiB."""
    devices = run_cli("devices").document["devices"]
    return {each["id"]: (kind(each["total_bytes"]), kind(each["free_bytes"])) for each in devices}


def test_cards_are_listed_without_a_context(cards: Cards) -> None:
    assert listed() == {name: (size, size) for name, size in SIZES_MIB.items()}
    assert cards.ledger().used_cards() == set()


@pytest.mark.parametrize(
    ("environ", "sizes_mib"),
    [
        ({"CUDA_VISIBLE_DEVICES": "2,0"}, [12288, 24576]),
        ({"CUDA_VISIBLE_DEVICES": "GPU-00000003,1"}, [12288, 24576]),
        ({"CUDA_VISIBLE_DEVICES": "1,7,0"}, [24576]),
        ({"CUDA_VISIBLE_DEVICES": ""}, []),
        # The newest first: card 2, then the others by their buses.
        ({"CUDA_DEVICE_ORDER": "FASTEST_FIRST"}, [12288, 24576, 24576, 64]),
        ({"CUDA_DEVICE_ORDER": "FASTEST_FIRST", "CUDA_VISIBLE_DEVICES": "0,3"}, [12288, 64]),
    ],
)
def test_what_the_user_hides_or_orders_is_respected_without_a_context(
    cards: Cards, monkeypatch: pytest.MonkeyPatch, environ: dict[str, str], sizes_mib: list[int]
) -> None:
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    assert listed() == {f"CUDA{at}": (size, size) for at, size in enumerate(sizes_mib)}
    assert cards.ledger().used_cards() == set()


@pytest.mark.parametrize("environ", [{}, {"CUDA_DEVICE_ORDER": "FASTEST_FIRST", "CUDA_VISIBLE_DEVICES": "3,1,0"}])
def test_probe_and_load_use_the_cards_of_the_layout_only(
    cards: Cards, monkeypatch: pytest.MonkeyPatch, model: Path, tmp_path: Path, environ: dict[str, str]
) -> None:
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    names = {size: name for name, (size, _) in listed().items()}
    layout = layout_file(tmp_path, (names[12288], "0-7"))
    run_cli("plan", str(model), "--layout", str(layout), "--probe", "--json")
    assert cards.ledger().used_cards() == {2}
    events = run_cli("load", str(model), "--layout", str(layout), "--json", "--prompt", "a b", "-n", "2").events
    assert events[-1]["event"] == "done"
    assert cards.ledger().used_cards() == {2}


def test_a_broken_card_costs_its_own_lane_only(
    cards: Cards, monkeypatch: pytest.MonkeyPatch, model: Path, tmp_path: Path
) -> None:
    monkeypatch.setenv("STAND_IN_BROKEN", "1")
    assert listed() == {name: (size, size) for name, size in SIZES_MIB.items()}
    layout = layout_file(tmp_path, ("CUDA0", "0-3"), ("CUDA2", "4-7"))
    assert run_cli("load", str(model), "--layout", str(layout), "--json").events[-1]["event"] == "loaded"
    layout = layout_file(tmp_path, ("CUDA0", "0-3"), ("CUDA1", "4-7"))
    ending = run_cli("load", str(model), "--layout", str(layout), "--json").events[-1]
    assert ending["event"] == "crashed"
    assert "on CUDA1: CUDA-capable device(s) is/are busy or unavailable" in ending["message"]


def test_a_slice_of_a_card_is_asked_itself_and_gets_its_own_context_back(
    cards: Cards, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STAND_IN_SLICED", "1")
    found = listed()
    assert cards.ledger().used_cards() == {1}
    guess_mib = TRAITS["CUDA"].overhead_bytes // MIB
    assert found.pop("CUDA1") == (24576, min(24576, 24576 - CONTEXT_MIB + guess_mib))
    assert found == {name: (size, size) for name, size in SIZES_MIB.items() if name != "CUDA1"}


READ = """
from engine.devices.telemetry.cards import Nvml, NvmlReader, list_nvidia_cards
nvml = Nvml()
for card in list_nvidia_cards():
    sample = NvmlReader("CUDA", card.slot, nvml).read(0.0)
    print(sample.used_bytes, sample.note)
"""


def test_telemetry_tells_nothing_of_a_slice(cards: Cards, monkeypatch: pytest.MonkeyPatch) -> None:
    """NVML has the memory of the whole card."""
    monkeypatch.setenv("STAND_IN_SLICED", "1")
    told = subprocess.run([sys.executable, "-c", READ], capture_output=True, text=True, check=True, timeout=DEADLINE_S)
    assert told.stdout.splitlines() == [
        "0 ",
        "None no reading: the device is a slice of a graphics card (MIG), and the driver reports only the whole card",
        "0 ",
        "0 ",
    ]
    assert cards.ledger().used_cards() == set()


@pytest.mark.parametrize("without_nvml", [False, True])
def test_a_context_is_counted_once(
    cards: Cards, monkeypatch: pytest.MonkeyPatch, model: Path, tmp_path: Path, without_nvml: bool
) -> None:
    if without_nvml:
        monkeypatch.setenv("STAND_IN_NO_NVML", "1")
    context_mib = TRAITS["CUDA"].overhead_bytes // MIB
    layout = layout_file(tmp_path, ("CUDA0", "0-7"), flash_attn="off")
    cards.insert("RTX 3090=8.6=24576", context_mib)
    words = (str(model), "--layout", str(layout), "--margin", "CUDA0=0", "--json")
    (row,) = [row for row in run_cli("plan", *words).document["devices"] if row["id"] == "CUDA0"]
    need_mib = -(-row["need_bytes"] // BLOCK_BYTES) * 2
    # To the block, and the same with and without NVML.
    cards.insert(f"RTX 3090=8.6={need_mib - 2}", context_mib)
    assert run_cli("plan", *words).document["fits"] is False
    cards.insert(f"RTX 3090=8.6={need_mib}", context_mib)
    assert run_cli("plan", *words).document["fits"] is True
    ended = run_cli("load", *words, "--prompt", "a b c d e f " * 330, "-n", "2").events[-1]
    assert ended["event"] == "done"


LOAD = """
import json, sys
from pathlib import Path
from app.cli.devices import find_machine
from engine.base.cancellation import CancelToken
from engine.machines.doctor.loads import LoadCheck
rig = find_machine()
check = LoadCheck(rig, Path(sys.argv[1]), CancelToken())
list(check.on(rig.device("CUDA2")))
print(check.calibration.overhead_bytes(rig.device("CUDA2")))
"""


@pytest.mark.parametrize("without_nvml", [False, True])
def test_the_overhead_that_an_examination_learns_has_one_context(
    cards: Cards, monkeypatch: pytest.MonkeyPatch, model: Path, without_nvml: bool
) -> None:
    cards.insert("RTX 3090=8.6=24576, RTX 3090=8.6=24576, RTX 5070=12.0=12288")
    if without_nvml:
        monkeypatch.setenv("STAND_IN_NO_NVML", "1")
    run = [sys.executable, "-c", LOAD, str(model)]
    done = subprocess.run(run, capture_output=True, text=True, check=True, timeout=DEADLINE_S)
    learned_mib = int(done.stdout.splitlines()[-1]) / MIB
    # Without NVML the list of devices gives its own context back by a guess, of which the load has the error.
    guess_mib = TRAITS["CUDA"].overhead_bytes / MIB
    expected_mib = guess_mib if without_nvml else CONTEXT_MIB
    # What comes while it answers is in the forecast already, as an upper bound.
    assert abs(learned_mib - expected_mib) < 64
    assert without_nvml or cards.ledger().used_cards() == {2}


LAB = """
from engine.machines.rigs.lab import LabRig
with LabRig([64 << 20]) as lab:
    print([device.id for device in lab.rig.devices])
"""


def test_a_lab_worker_uses_no_card(cards: Cards) -> None:
    run = subprocess.run([sys.executable, "-c", LAB], capture_output=True, text=True, check=True, timeout=DEADLINE_S)
    assert run.stdout == "['RPC0']\n"
    assert cards.ledger().used_cards() == set()

"""The real window on four simulated cards: place layers by mouse, load, run out of memory, apply a proposal."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from engine.base.units import MIB
from tests.engine.cuda.conftest import CONTEXT_MIB, Cards
from tests.support.desktop import Window, open_desktop, open_window
from tests.support.window_steps import LOAD_BUTTON, load, load_anyway, move_range, set_context

pytestmark = pytest.mark.engine("cuda")

CARDS = "RTX 3090=8.6=24576, RTX 3090=8.6=24576, RTX 5070=12.0=12288, RTX 3050=8.6=768"
FIRST_BUTTON = "load_report.proposal_list.buttons.0"


def used_mib(window: Window) -> list[int]:
    """Return what the last samples of the window say of each card."""
    free = ast.literal_eval(window.ask("text", "desk.rig.live.memory.free_bytes"))
    totals = [window.ask("text", f"desk.rig.live.rig.devices.{at}.total_bytes") for at in range(4)]
    return [(int(total) - free[f"CUDA{at}"]) // MIB for at, total in enumerate(totals)]


def test_place_load_run_out_of_memory_and_take_a_proposal(cards: Cards, model: Path, tmp_path: Path) -> None:
    cards.insert(CARDS)
    home = tmp_path / "home"
    home.mkdir()
    with open_desktop("1280x800") as desktop, open_window(desktop, home, model=model) as window:
        window.wait_for("the cards", lambda: "CUDA3" in window.ask("text", "desk.rig.live.rig.ids"))
        window.wait_for("the proposal", lambda: window.ask("layout") == [["CUDA0", 0, 7]])
        move_range(window, 0, 3, "CUDA0", "CUDA1")
        window.wait_for("the layout", lambda: window.ask("layout") == [["CUDA1", 0, 3], ["CUDA0", 4, 7]])
        # Neither the list of devices nor telemetry has used a card; a probe uses those of the layout.
        assert cards.ledger().used_cards() <= {0, 1}
        load(window)
        assert window.ask("text", "load_report.badge_text") == "LOADED"
        assert window.ask("engine_layout") == [["CUDA1", 0, 3], ["CUDA0", 4, 7]]
        window.wait_for("the samples", lambda: min(used_mib(window)[:2]) > CONTEXT_MIB)
        assert used_mib(window)[2:] == [0, 0]
        assert cards.ledger().used_cards() == {0, 1}
        window.ask("trigger", "unload")
        window.wait_for("the unload", lambda: window.ask("state") == "STOPPED")
        window.wait_for("the samples", lambda: used_mib(window) == [0, 0, 0, 0])

        # The cache of this context does not fit beside a context on the small card.
        move_range(window, 0, 3, "CUDA1", "CUDA3")
        window.wait_for("the layout", lambda: window.ask("layout") == [["CUDA3", 0, 3], ["CUDA0", 4, 7]])
        set_context(window, 131072)
        before = window.ask("text", "desk.document.edit")
        window.click(LOAD_BUTTON)
        load_anyway(window)
        window.wait_for("the refusal", lambda: window.ask("text", "load_report.badge_text") == "OUT OF MEMORY")
        window.wait_for("its place", lambda: bool(window.ask("visible", "load_report.proposal_list")))
        assert "CUDA3" in window.ask("text", "load_report.sentence")
        window.click(FIRST_BUTTON)
        window.wait_for("the change", lambda: window.ask("text", "desk.document.edit") != before)
        load(window)
        assert window.ask("text", "load_report.badge_text") == "LOADED"
        desktop.picture(tmp_path / "loaded.png")
        assert cards.ledger().used_cards() <= {0, 1, 3} | cards_of(window)
        assert window.ask("bugs") == []


def cards_of(window: Window) -> set[int]:
    """Return the numbers of the cards with layers of the loaded model."""
    return {int(device[-1]) for device, _first, _last in window.ask("engine_layout") if device != "CPU"}

"""A load that runs out of memory in the real window: one click applies the first proposal, it loads, undo works."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.desktop import open_desktop, open_window
from tests.support.window_steps import LOAD_BUTTON, load, load_anyway, open_demo, set_context

FIRST_BUTTON = "load_report.proposal_list.buttons.0"


@pytest.mark.parametrize("theme", ["dark", pytest.param("light", marks=pytest.mark.exhaustive)])
def test_the_first_proposal_is_applied_loaded_and_undone(tmp_path: Path, theme: str) -> None:
    with open_desktop("1280x800") as desktop, open_window(desktop, tmp_path, theme=theme) as window:
        open_demo(window)
        set_context(window, 131072)
        before = window.ask("text", "desk.document.edit")
        window.click(LOAD_BUTTON)
        load_anyway(window)
        window.wait_for("the refusal", lambda: window.ask("text", "load_report.badge_text") == "OUT OF MEMORY")
        window.wait_for("its place", lambda: bool(window.ask("visible", "load_report.proposal_list")))
        desktop.picture(tmp_path / "proposals.png")
        window.click(FIRST_BUTTON)
        window.wait_for("the change", lambda: window.ask("text", "desk.document.edit") != before)
        assert window.ask("state") == "STOPPED"
        load(window)
        assert window.ask("text", "load_report.badge_text") == "LOADED"
        assert window.ask("text", "load_report.proposal_list") == "None"
        desktop.key("ctrl+z")
        window.wait_for("undo", lambda: window.ask("text", "desk.document.edit") == before)
        assert window.ask("bugs") == []

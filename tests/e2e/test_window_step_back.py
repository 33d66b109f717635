"""Stepping back in the real window: enabled in the menu, a load that does not fit uses another layout."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.desktop import open_desktop, open_window
from tests.support.window_steps import load, open_demo, set_context


@pytest.mark.parametrize("theme", ["dark", pytest.param("light", marks=pytest.mark.exhaustive)])
def test_a_load_that_does_not_fit_steps_back_and_undo_returns(tmp_path: Path, theme: str) -> None:
    with open_desktop("1280x800") as desktop, open_window(desktop, tmp_path, theme=theme) as window:
        open_demo(window)
        set_context(window, 40960)
        before = window.ask("layout")
        window.ask("trigger", "step_back")
        load(window)
        assert window.ask("text", "load_report.badge_text") == "LOADED"
        assert "2. " in window.ask("text", "load_report.attempts")
        after = window.ask("layout")
        assert before == [["RPC2", 0, 15]] != after
        desktop.picture(tmp_path / "stepped_back.png")
        desktop.key("ctrl+z")
        window.wait_for("undo", lambda: window.ask("layout") == before)
        assert window.ask("bugs") == []

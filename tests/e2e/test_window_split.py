"""Split mode tensor in the real window: chosen by a click, with shares, loaded on lab workers, and left again."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.desktop import open_desktop, open_window
from tests.support.window_steps import ask_model, load, open_demo

TENSOR = "settings_bar.split_chooser.tensor_button"


@pytest.mark.exhaustive
def test_a_click_on_tensor_splits_over_all_workers_and_loads(tmp_path: Path) -> None:
    with open_desktop("1280x800") as desktop, open_window(desktop, tmp_path) as window:
        open_demo(window)
        assert not window.ask("visible", "share_editor")
        window.click(TENSOR)
        window.wait_for("the shares", lambda: bool(window.ask("visible", "share_editor")))
        shares = window.ask("text", "desk.document.edit.layout.tensor_split")
        assert all(device in shares for device in ("RPC0", "RPC1", "RPC2"))
        load(window)
        assert window.ask("text", "load_report.badge_text") == "LOADED"
        ask_model(window, "hello")
        window.wait_for("an answer", lambda: len(window.ask("text", "chat.messages")) > 60)
        window.click("chat.stop_button")
        window.wait_for("the stop", lambda: window.ask("state") == "READY")
        window.desktop.key("ctrl+z")
        window.wait_for("undo", lambda: not window.ask("visible", "share_editor"))
        assert window.ask("layout") == [["RPC2", 0, 15]]
        assert window.ask("bugs") == []

"""The demo model on a lab rig in the real window: two clicks, and an answer to a sample question."""

from __future__ import annotations

from pathlib import Path

from engine.model.demo.speaking import FILE_NAME, SAMPLE_PROMPTS
from tests.support.desktop import Desktop, open_window
from tests.support.real_model import real_model
from tests.support.window_steps import LOAD_BUTTON


def test_the_fetched_demo_loads_on_its_lab_and_answers_a_question(desktop: Desktop, tmp_path: Path) -> None:
    models = tmp_path / "xdg_cache_home" / "layerdeck" / "models"
    models.mkdir(parents=True)
    (models / FILE_NAME).symlink_to(real_model())
    with open_window(desktop, tmp_path) as window:
        window.wait_for("start", lambda: bool(window.ask("visible", "model_panel.start_panel")))
        window.wait_for("its place on the screen", lambda: window.ask("text", "isActiveWindow") == "True")
        window.click("model_panel.start_panel.try_demo_button")
        window.wait_for("the proposal", lambda: {run[0] for run in window.ask("layout") or []} == {"RPC0", "RPC2"})
        window.click(LOAD_BUTTON)
        window.wait_for("the load", lambda: window.ask("state") == "READY")
        assert "The forecast was exact." in window.ask("text", "load_report.sentence")
        window.click("chat.sample_prompts.buttons.0")
        window.wait_for("an answer", lambda: "photosynthesis" in window.ask("text", "chat.messages"))
        assert SAMPLE_PROMPTS[0] in window.ask("text", "chat.messages")
        assert window.ask("text", "chat.sample_prompts.isVisible") == "False"
        window.click("chat.stop_button")
        window.wait_for("the end of the answer", lambda: window.ask("state") == "READY")
        assert window.ask("bugs") == []

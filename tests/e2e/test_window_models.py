"""Two models in the real window: loaded together, competing for memory, switched, and ended with the window."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from tests.support.desktop import Desktop, Window, open_window
from tests.support.models import write_tiny_llama
from tests.support.patience import DEADLINE_S
from tests.support.window_steps import (
    ask_model,
    children_of,
    engines,
    load,
    move_range,
    open_demo,
    status,
    wait_until_gone,
)

ROWS = "model_panel.loaded_list.rows"


@pytest.fixture
def window(desktop: Desktop, tmp_path: Path) -> Iterator[Window]:
    with open_window(desktop, tmp_path) as opened:
        open_demo(opened)
        yield opened


def place_of_the_other(window: Window) -> str:
    """Wait until the other model is shown, wholly on one worker; return that worker.

    RPC2 belongs to the demo model. Which of the two equal workers is proposed depends on their free memory.
    """
    alone = [[["RPC0", 0, 4]], [["RPC1", 0, 4]]]
    window.wait_for("the other model", lambda: window.ask("layout") in alone)
    return str(window.ask("layout")[0][0])


def loaded(window: Window) -> list[str]:
    """The names of the loaded models in the panel."""
    return [row.split(",")[0] for row in window.ask("loaded_models")]


def unloads(window: Window) -> bool:
    """Click Unload until the question is gone: it may still move while the report above it gets its text."""
    if window.ask("visible", "load_question"):
        window.click("load_question.unload_button")
        return False
    return True


def test_two_models_side_by_side_and_in_each_others_way(window: Window, tmp_path: Path) -> None:
    load(window)
    window.click("chat.prompt_edit")
    window.desktop.type_text("not sent yet")
    window.ask("drop", str(write_tiny_llama(tmp_path / "other.gguf", n_layers=5)))
    place = place_of_the_other(window)
    load(window)
    assert not window.ask("visible", "load_question")
    assert len(engines(window)) == 2
    window.wait_for("both", lambda: loaded(window) == ["Layerdeck demo", "other"])
    ask_model(window, "hello")
    window.wait_for("an answer", lambda: bool(window.ask("last_answer")))
    # A short answer may have ended by itself.
    window.desktop.key("Escape")
    window.wait_for("its end", lambda: window.ask("state") == "READY")

    window.click(f"{ROWS}.0")
    window.wait_for("the demo model", lambda: window.ask("layout") == [["RPC2", 0, 15]])
    assert window.ask("text", "chat.prompt_edit.toPlainText") == "not sent yet"
    assert window.ask("text", "load_report.badge_text") == "LOADED"
    window.desktop.key("ctrl+a")
    ask_model(window, "go on")
    window.wait_for("the answer", lambda: window.ask("state") == "ANSWERING")

    window.click(f"{ROWS}.1")
    window.wait_for("the other model again", lambda: window.ask("layout") == [[place, 0, 4]])
    move_range(window, 0, 1, place, "RPC2")
    window.wait_for("the move", lambda: window.ask("layout") == [["RPC2", 0, 1], [place, 2, 4]])
    window.desktop.key("ctrl+Return")
    window.wait_for("the question", lambda: bool(window.ask("visible", "load_question")))
    assert "RPC2, which Layerdeck demo" in window.ask("text", "load_question.text")
    window.click("load_question.cancel_button")
    window.wait_for("no question", lambda: not window.ask("visible", "load_question"))
    assert len(loaded(window)) == 2
    window.desktop.key("ctrl+Return")
    window.wait_for("the question again", lambda: bool(window.ask("visible", "load_question")))
    window.wait_for("an answer to it", partial(unloads, window))
    window.wait_for("the new layout", lambda: window.ask("text", "desk.is_edited") == "False")
    window.wait_for("its load", lambda: window.ask("state") == "READY")
    assert loaded(window) == ["other"]
    assert window.ask("engine_layout") == [["RPC2", 0, 1], [place, 2, 4]]
    assert status(window) == "other is loaded"
    window.click(f"{ROWS}.0.end_button")
    window.wait_for("nothing loaded", lambda: loaded(window) == [])
    assert window.ask("bugs") == []


@pytest.mark.exhaustive
def test_a_crash_of_one_is_told_by_name_and_closing_ends_the_other(window: Window, tmp_path: Path) -> None:
    load(window)
    (demo,) = engines(window)
    window.ask("drop", str(write_tiny_llama(tmp_path / "other.gguf", n_layers=5)))
    place_of_the_other(window)
    load(window)
    demo.kill()
    window.wait_for("the loss", lambda: status(window).startswith("Layerdeck demo: "))
    assert loaded(window) == ["other"]
    assert window.ask("state") == "READY"
    assert window.ask("text", "load_report.badge_text") == "LOADED"
    ask_model(window, "hello")
    window.wait_for("an answer", lambda: window.ask("state") == "ANSWERING")
    children = children_of(window)
    window.desktop.key("ctrl+q")
    assert window.process.wait(DEADLINE_S) == 0
    wait_until_gone(children)

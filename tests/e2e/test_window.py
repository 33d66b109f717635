"""The main use of the real window: place layers by mouse, load, run out of memory, chat, lose a child, quit."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.desktop import Desktop, Window, open_window
from tests.support.patience import DEADLINE_S
from tests.support.window_steps import (
    LOAD_BUTTON,
    SPREAD,
    ask_model,
    children_of,
    engines,
    load,
    load_anyway,
    open_demo,
    set_context,
    spread_layers,
    wait_until_gone,
)


@pytest.fixture
def window(desktop: Desktop, tmp_path: Path) -> Iterator[Window]:
    """The window as on a machine without a GPU, after the one click that offers the demo model on a lab rig."""
    with open_window(desktop, tmp_path) as opened:
        open_demo(opened)
        yield opened


def test_a_layout_made_by_mouse_that_does_not_fit_names_the_worker_and_then_loads_and_answers(window: Window) -> None:
    spread_layers(window)
    set_context(window, 131072)
    window.click(LOAD_BUTTON)
    load_anyway(window)
    window.wait_for("the refusal", lambda: window.ask("text", "load_report.badge_text") == "OUT OF MEMORY")
    sentence = window.ask("text", "load_report.sentence")
    assert "RPC" in sentence
    assert "MiB" in sentence
    assert window.ask("state") == "STOPPED"
    assert window.ask("layout") == SPREAD
    window.desktop.key("ctrl+z")
    window.wait_for("undo", lambda: window.ask("text", "desk.document.edit.context.n_ctx") == "8192")
    load(window)
    assert window.ask("text", "load_report.badge_text") == "LOADED"
    assert window.ask("text", "desk.is_edited") == "False"
    assert window.ask("engine_layout") == SPREAD
    ask_model(window, "hello")
    window.wait_for("an answer", lambda: len(window.ask("text", "chat.messages")) > 60)
    window.click("chat.stop_button")
    window.wait_for("the stop", lambda: window.ask("state") == "READY")
    # The note comes with the stored message, which may be a moment later than the state.
    window.wait_for("its speed", lambda: "tokens/s" in window.ask("last_note"))
    assert window.ask("bugs") == []


def test_a_killed_child_costs_the_answer_only_and_comes_back_once_where_that_is_wanted(
    window: Window,
) -> None:
    load(window)
    ask_model(window, "tell me")
    window.wait_for("an answer", lambda: len(window.ask("text", "chat.messages")) > 60)
    (worker,) = engines(window)
    worker.kill()
    window.wait_for("the loss", lambda: window.ask("state") == "STOPPED")
    assert window.ask("text", "load_report.badge_text") == "CRASHED"
    assert window.ask("text", "chat.prompt_edit.toPlainText") == "", "the question stays in the conversation"
    assert window.ask("last_answer")
    # The note comes with the stored message, which may be a moment later than the state.
    said = "The engine ended during this answer. Details are under Last load. The partial answer was kept."
    window.wait_for("the note", lambda: window.ask("last_note").startswith(said))
    assert " token" in window.ask("last_note")
    assert window.ask("visible", "chat.check_button")
    window.click("chat.lost_banner.button")
    window.wait_for("the model again", lambda: window.ask("state") == "READY")
    assert not window.ask("visible", "chat.lost_banner.button")
    ask_model(window, "again")
    window.wait_for("the new answer", lambda: window.ask("state") == "ANSWERING")
    window.wait_for("its words", lambda: len(window.ask("last_answer")) > 20)  # Longer than the question.
    window.click("chat.stop_button")
    window.wait_for("its speed", lambda: "tokens/s" in window.ask("last_note"))

    window.ask("trigger", "reload_lost")
    (first,) = engines(window)
    first.kill()
    # The child first: a state that was read before it may be the one of the killed child.
    window.wait_for("another", lambda: bool(set(engines(window)) - {first}) and window.ask("state") == "READY")
    (second,) = set(engines(window)) - {first}
    second.kill()
    window.wait_for("the offer", lambda: bool(window.ask("visible", "chat.lost_banner.button")))
    assert window.ask("state") == "STOPPED"
    assert window.ask("bugs") == []


def test_quitting_while_an_answer_is_written_leaves_no_process(window: Window) -> None:
    load(window)
    ask_model(window, "go on")
    window.wait_for("an answer", lambda: window.ask("state") == "ANSWERING")
    children = children_of(window)
    assert len(children) >= 4
    window.desktop.key("ctrl+q")
    assert window.process.wait(DEADLINE_S) == 0
    wait_until_gone(children)


@pytest.mark.exhaustive
def test_quitting_while_loading_leaves_no_process(window: Window) -> None:
    window.click(LOAD_BUTTON)
    window.wait_for("the child", lambda: bool(engines(window)))
    children = children_of(window)
    window.process.terminate()
    assert window.process.wait(DEADLINE_S) == 0
    wait_until_gone(children)


@pytest.mark.exhaustive
def test_a_drag_is_given_up_keys_move_layers_and_a_bad_file_says_why(window: Window, tmp_path: Path) -> None:
    mouse = window.desktop
    start, target = window.ask("layer", "3@RPC2"), window.ask("layer", "3@RPC0")
    mouse.mouse("mousemove", "--sync", *start, "mousedown", 1, "mousemove", "--sync", *target)
    window.wait_for("the drag", lambda: window.ask("layout") == [["RPC0", 0, 15]])
    mouse.key("Escape")
    window.wait_for("the way back", lambda: window.ask("layout") == [["RPC2", 0, 15]])
    mouse.mouse("mouseup", 1)
    assert window.ask("layout") == [["RPC2", 0, 15]]

    mouse.click(*window.ask("layer", "15@RPC2"))
    mouse.key("shift+Left", "shift+Left")
    mouse.key("ctrl+Up")
    window.wait_for("the move", lambda: window.ask("layout") == [["RPC2", 0, 12], ["RPC1", 13, 15]])
    mouse.key("ctrl+z")
    window.wait_for("undo", lambda: window.ask("layout") == [["RPC2", 0, 15]])
    mouse.key("ctrl+shift+z")
    window.wait_for("redo", lambda: window.ask("layout") == [["RPC2", 0, 12], ["RPC1", 13, 15]])

    bad = tmp_path / "broken.gguf"
    bad.write_bytes(b"GGUF\x03\x00\x00\x00")
    window.ask("drop", str(bad))
    window.wait_for("the reason", lambda: "broken.gguf" in window.ask("text", "status_text"))
    assert window.ask("layout") is not None
    assert window.ask("bugs") == []

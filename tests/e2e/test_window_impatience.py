"""Actions at wrong moments in the real window: it stays usable."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.desktop import Desktop, Window, open_window
from tests.support.models import write_tiny_llama
from tests.support.window_steps import (
    LOAD_BUTTON,
    ask_model,
    engines,
    lab_workers,
    load,
    move_range,
    open_demo,
    set_context,
    status,
)

BADGE = "load_report.badge_text"


@pytest.fixture
def window(desktop: Desktop, tmp_path: Path) -> Iterator[Window]:
    with open_window(desktop, tmp_path) as opened:
        open_demo(opened)
        yield opened
        assert opened.ask("bugs") == []


def wait_for_state(window: Window, state: str) -> None:
    window.wait_for(state, lambda: window.ask("state") == state)


def test_a_load_that_hangs_can_be_cancelled_and_two_asked_for_are_one(window: Window) -> None:
    window.click(LOAD_BUTTON)
    window.wait_for("the child", lambda: any(child.suspend() is None for child in engines(window)))
    (child,) = engines(window)
    window.wait_for("progress", lambda: status(window).endswith("…"))
    window.click("settings_bar.load_buttons.cancel_button")
    wait_for_state(window, "STOPPED")
    assert window.ask("text", BADGE) == "CANCELLED"
    assert not child.is_running()
    window.desktop.key("ctrl+Return", "ctrl+Return")
    wait_for_state(window, "READY")
    assert len(engines(window)) == 1


@pytest.mark.exhaustive
def test_unloading_or_replacing_a_model_in_the_middle_of_an_answer(window: Window) -> None:
    load(window)
    ask_model(window, "one")
    wait_for_state(window, "ANSWERING")
    window.desktop.key("ctrl+u")
    wait_for_state(window, "STOPPED")
    assert window.ask("text", "chat.prompt_edit.toPlainText") == "", "the question stays in the conversation"
    window.desktop.key("ctrl+Return")
    wait_for_state(window, "READY")
    assert window.ask("text", BADGE) == "LOADED"
    ask_model(window, "two")
    wait_for_state(window, "ANSWERING")
    move_range(window, 0, 3, "RPC2", "RPC0")
    window.desktop.key("ctrl+Return")
    window.wait_for("the other layout", lambda: window.ask("text", "desk.is_edited") == "False")
    wait_for_state(window, "READY")
    assert window.ask("engine_layout") == [["RPC0", 0, 3], ["RPC2", 4, 15]]
    assert len(window.ask("text", "chat.messages")) > 20


@pytest.mark.exhaustive
def test_another_model_opened_while_one_loads_has_a_place_of_its_own(window: Window, tmp_path: Path) -> None:
    first = write_tiny_llama(tmp_path / "first.gguf", n_layers=3)
    second = write_tiny_llama(tmp_path / "second.gguf", n_layers=5)
    window.click("chat.prompt_edit")
    window.desktop.type_text("keep this")
    window.desktop.key("ctrl+Return", "Return")
    window.wait_for("the load", lambda: window.ask("state") != "STOPPED")
    window.ask("drop", str(first))
    window.ask("drop", str(second))
    # The worker of the model that is being loaded is taken.
    window.wait_for("the last one", lambda: window.ask("layout") == [["RPC0", 0, 4]])
    assert window.ask("state") == "STOPPED"
    assert window.ask("text", "chat.prompt_edit.toPlainText") == ""
    assert window.ask("text", "settings_bar.load_buttons.load_button.text") == "Load"
    window.ask("text", "desk.open_demo")
    window.wait_for("the loaded one", lambda: window.ask("layout") == [["RPC2", 0, 15]])
    wait_for_state(window, "READY")
    assert window.ask("text", "desk.is_edited") == "False"
    assert window.ask("text", "chat.prompt_edit.toPlainText") == "keep this"


@pytest.mark.exhaustive
def test_a_conversation_too_long_for_the_context_leaves_the_report_alone(window: Window) -> None:
    set_context(window, 256)
    load(window)
    ask_model(window, "far too long " * 40)
    window.wait_for("the refusal", lambda: "256" in window.ask("last_note"))
    assert window.ask("state") == "READY"
    assert window.ask("text", BADGE) == "LOADED"
    assert window.ask("text", "chat.prompt_edit.toPlainText") == "", "the question stays in the conversation"


@pytest.mark.exhaustive
def test_the_lab_can_go_under_a_loaded_model_and_comes_once(window: Window) -> None:
    load(window)
    ask_model(window, "go on")
    wait_for_state(window, "ANSWERING")
    window.ask("text", "desk.stop_lab")
    window.wait_for("an empty room", lambda: not lab_workers(window) and not engines(window))
    assert window.ask("state") == "STOPPED"
    assert window.ask("text", BADGE) == "LOADED"
    window.wait_for("what is left", lambda: window.ask("layout") == [["CPU", 0, 15]])
    window.ask("text", "desk.try_demo")
    window.ask("text", "desk.try_demo")
    window.wait_for("the lab", lambda: window.ask("layout") == [["RPC2", 0, 15]])
    load(window)
    assert len(lab_ports(window)) == 3


def lab_ports(window: Window) -> list[str]:
    return str(window.ask("text", "desk.rig.lab.endpoints")).split(",")


@pytest.mark.exhaustive
def test_a_remote_worker_is_warned_of_once_and_a_wrong_address_is_explained(window: Window) -> None:
    keys = window.desktop
    window.ask("text", "add_remote")
    window.wait_for("the warning", lambda: window.ask("active") == "Before you add a remote worker")
    keys.key("Return")  # Enter alone does not agree
    window.wait_for("its end", lambda: window.ask("bugs") == [])
    window.ask("text", "add_remote")
    window.wait_for("the warning again", lambda: window.ask("active") == "Before you add a remote worker")
    keys.key("alt+t")
    window.wait_for("the question", lambda: window.ask("active") == "Add a remote worker")
    keys.type_text("nowhere")
    keys.key("Return")
    assert window.ask("bugs") == ["Add a remote worker"]
    keys.key("ctrl+a")
    keys.type_text("127.0.0.1:1")
    keys.key("Return")
    window.wait_for("the reason", lambda: "127.0.0.1:1 refused" in status(window))
    window.ask("text", "add_remote")
    window.wait_for("the question at once", lambda: window.ask("active") == "Add a remote worker")
    keys.key("Escape")
    window.wait_for("the end", lambda: window.ask("bugs") == [])

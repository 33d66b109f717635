"""Actions of a person in the window, for end-to-end tests."""

from __future__ import annotations

from typing import Any

import psutil

from tests.support.command_line import role_of
from tests.support.desktop import Window
from tests.support.patience import DEADLINE_S

LOAD_BUTTON = "settings_bar.load_buttons.load_button"
CONTEXT_BOX = "settings_bar.context_editor.n_ctx_box"
SPREAD: list[list[Any]] = [["RPC0", 0, 4], ["CPU", 5, 6], ["RPC1", 7, 11], ["RPC0", 12, 13], ["RPC2", 14, 15]]


def status(window: Window) -> str:
    return str(window.ask("text", "status_text"))


def open_demo(window: Window) -> None:
    """Click the button that opens the demo model on a lab rig, and wait for its layout."""
    window.wait_for("start", lambda: bool(window.ask("visible", "model_panel.start_panel")))
    window.wait_for("its place on the screen", lambda: window.ask("text", "isActiveWindow") == "True")
    window.click("model_panel.start_panel.try_demo_button")
    window.wait_for("the proposal", lambda: window.ask("layout") == [["RPC2", 0, 15]])


def move_range(window: Window, first: int, last: int, source: str, target: str) -> None:
    """Select layers by click and Shift+click, and drag them to the lane of `target`."""
    mouse = window.desktop
    mouse.click(*window.ask("layer", f"{first}@{source}"))
    mouse.mouse("keydown", "shift")
    mouse.click(*window.ask("layer", f"{last}@{source}"))
    mouse.mouse("keyup", "shift")
    window.drag_layers((first + last) // 2, source, target)


def spread_layers(window: Window) -> None:
    """Drag layers until the layout is `SPREAD`: runs on the CPU and three workers, one of them with two."""
    window.wait_for("the proposal", lambda: window.ask("layout") == [["RPC2", 0, 15]])
    for device, first, last in SPREAD[:-1]:
        move_range(window, first, last, "RPC2", device)
    window.wait_for("the layout", lambda: window.ask("layout") == SPREAD)


def load(window: Window) -> None:
    window.click(LOAD_BUTTON)
    window.wait_for("the load", lambda: window.ask("state") == "READY")


def set_context(window: Window, tokens: int) -> None:
    window.click(CONTEXT_BOX)
    window.wait_for("the focus", lambda: window.ask("text", f"{CONTEXT_BOX}.hasFocus") == "True")
    window.desktop.key("ctrl+a")
    window.desktop.type_text(str(tokens))
    window.desktop.key("Return")
    window.wait_for("the context", lambda: window.ask("text", "desk.document.edit.context.n_ctx") == str(tokens))


def load_anyway(window: Window) -> None:
    """Choose to load in spite of the warning that the layout does not fit.

    It waits for the proposal, since the buttons move when it appears.
    """
    window.wait_for("the question", lambda: bool(window.ask("visible", "load_question.proposal_button")))
    window.click("load_question.without_unload_button")


def ask_model(window: Window, question: str) -> None:
    window.click("chat.prompt_edit")
    window.desktop.type_text(question)
    window.desktop.key("Return")


def children_of(window: Window) -> list[psutil.Process]:
    return list(psutil.Process(window.process.pid).children(recursive=True))


def lab_workers(window: Window) -> set[psutil.Process]:
    """Return the processes of the lab rig's workers."""
    return {each for each in children_of(window) if role_of(each).startswith("lab")}


def engines(window: Window) -> list[psutil.Process]:
    """Return the model children of the window."""
    return [each for each in children_of(window) if role_of(each) == "worker"]


def wait_until_gone(processes: list[psutil.Process]) -> None:
    _, alive = psutil.wait_procs(processes, timeout=DEADLINE_S)
    assert not alive

"""Conversations in the real window survive a kill: their messages, and their saved KV state."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.desktop import Desktop, Window, open_window
from tests.support.models import write_tiny_llama
from tests.support.window_steps import ask_model, load

CHATS = "chat_view.conversations"


def answer_of(window: Window) -> str:
    return str(window.ask("last_answer"))


def test_what_was_on_the_screen_survives_a_kill_and_can_be_gone_on_with(desktop: Desktop, tmp_path: Path) -> None:
    model = write_tiny_llama(tmp_path / "tiny.gguf", n_layers=2, n_ctx_train=1 << 16)
    with open_window(desktop, tmp_path, model=model) as window:
        window.wait_for("the model", lambda: window.ask("layout") == [["CPU", 0, 1]])
        window.wait_for("its place on the screen", lambda: window.ask("text", "isActiveWindow") == "True")
        load(window)
        window.desktop.key("ctrl+3")
        window.wait_for("the chat alone", lambda: bool(window.ask("visible", "device_strip.line")))
        assert not window.ask("visible", "editor")
        ask_model(window, "tell me more")
        window.wait_for("an answer", lambda: len(answer_of(window)) > 60)
        assert int(window.ask("text", "chat.context_meter.text").split(" / ")[0]) > len("tell me more") // 2
        shown = answer_of(window)
        window.process.kill()
        window.process.wait()
    with open_window(desktop, tmp_path, model=model) as window:
        window.wait_for("the conversation", lambda: "tell me more" in window.ask("text", "chat.messages"))
        window.wait_for("its place on the screen", lambda: window.ask("text", "isActiveWindow") == "True")
        assert answer_of(window).startswith(shown)
        assert "ended during this answer" in window.ask("last_note")
        window.desktop.key("ctrl+3")
        window.wait_for("the list", lambda: window.ask("text", f"{CHATS}.list_model.rowCount") == "1")
        window.desktop.key("ctrl+n")
        window.wait_for("a new one", lambda: window.ask("text", "chat.messages") == "()")
        x, y, width, _ = window.ask("rect", f"{CHATS}.list_view")
        window.desktop.click(x + width // 2, y + 10)
        window.wait_for("the one before", lambda: "tell me more" in window.ask("text", "chat.messages"))
        window.desktop.key("ctrl+1")
        window.wait_for("the editor", lambda: bool(window.ask("visible", "editor")))
        assert not window.ask("visible", "chat")
        window.desktop.key("ctrl+2")
        window.wait_for("both", lambda: bool(window.ask("visible", "chat")))
        assert window.ask("visible", "editor")
        assert window.ask("bugs") == []


@pytest.mark.exhaustive
def test_a_killed_window_reads_nothing_again(desktop: Desktop, tmp_path: Path) -> None:
    model = write_tiny_llama(tmp_path / "tiny.gguf", n_layers=2, n_ctx_train=1 << 16)
    states = tmp_path / "xdg_cache_home" / "layerdeck" / "states"
    with open_window(desktop, tmp_path, model=model) as window:
        window.wait_for("the model", lambda: window.ask("layout") == [["CPU", 0, 1]])
        window.wait_for("its place on the screen", lambda: window.ask("text", "isActiveWindow") == "True")
        load(window)
        ask_model(window, "a long beginning of a conversation " * 6)
        window.wait_for("words", lambda: len(answer_of(window)) > 20)
        window.ask("trigger", "stop_answer")
        window.wait_for("the end of the answer", lambda: window.ask("state") == "READY")
        window.wait_for("the kept cache", lambda: bool(list(states.glob("*.state"))))
        window.process.kill()
        window.process.wait()
    with open_window(desktop, tmp_path, model=model) as window:
        window.wait_for("the conversation", lambda: "a long beginning" in window.ask("text", "chat.messages"))
        window.wait_for("the model", lambda: window.ask("layout") == [["CPU", 0, 1]])
        window.wait_for("its place on the screen", lambda: window.ask("text", "isActiveWindow") == "True")
        load(window)
        window.wait_for("the cache", lambda: "KV state restored" in window.ask("text", "chat.status_text"))
        before = answer_of(window)
        ask_model(window, "go on")
        # stopped before its first words it would not have looked into the cache
        window.wait_for("words", lambda: answer_of(window) not in ("", "go on", before))
        window.ask("trigger", "stop_answer")
        window.wait_for("the end of the answer", lambda: "from the cache" in window.ask("last_note"))
        assert window.ask("bugs") == []

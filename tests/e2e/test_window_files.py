"""Files in the real window: dropped on any part of it, unreadable ones, rig files, and a restart."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import IO

import pytest

from tests.support.desktop import ROOT, Desktop, Window, open_window
from tests.support.drag_source import SIZE_PX
from tests.support.models import write_tiny_llama
from tests.support.patience import DEADLINE_S
from tests.support.window_steps import status

DROP_PLACES = (
    "chat.prompt_edit",
    "chat.empty",
    "model_panel.search_edit",
    "model_panel.list_view",
    "settings_bar.context_editor.n_ctx_box",
    "editor.view",
    "device_strip",
    "load_report",
)


MOST_DROPS = 6


@contextlib.contextmanager
def file_at_hand(desktop: Desktop, path: Path) -> Iterator[IO[str]]:
    """Show a spot in the screen's corner from which `path` can be dragged; it says what happens to the drag."""
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.support.drag_source", str(path)],
        cwd=ROOT,
        env=desktop.environment,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    try:
        assert process.stdout.readline() == "ready\n"
        yield process.stdout
    finally:
        process.terminate()
        process.wait(DEADLINE_S)
        process.stdout.close()


def drop_on(window: Window, place: str, source: IO[str]) -> None:
    mouse = window.desktop.mouse
    x, y, width, height = window.ask("rect", place)
    x, y = x + width // 2, y + height // 2
    mouse("mousemove", "--sync", SIZE_PX // 2, SIZE_PX // 2, "mousedown", 1, "mousemove", "--sync", SIZE_PX, SIZE_PX)
    assert source.readline() == "dragging\n"
    mouse("mousemove", "--sync", x - 3, y, "mousemove", "--sync", x, y)
    window.ask("state")  # The window has handled what came before.
    mouse("mouseup", 1)


def drop_until(window: Window, place: str, source: IO[str], is_done: Callable[[], bool]) -> None:
    """Drop the file on a place of the window until `is_done`.

    More than once on a busy machine: nothing is dropped if the button is released before the source of the drag has the
    window's answer.
    """
    for _ in range(MOST_DROPS):
        drop_on(window, place, source)
        with contextlib.suppress(AssertionError):
            window.wait_for(f"the drop on {place}", is_done, DEADLINE_S / MOST_DROPS)
            return
    raise AssertionError(f"no drop on {place} was taken")


@pytest.mark.exhaustive
def test_a_file_can_be_dropped_on_every_part_of_the_window(desktop: Desktop, tmp_path: Path) -> None:
    first = write_tiny_llama(tmp_path / "first.gguf", n_layers=2)
    dropped = write_tiny_llama(tmp_path / "dropped.gguf", n_layers=3)
    with open_window(desktop, tmp_path, model=first) as window, file_at_hand(desktop, dropped) as source:
        window.wait_for("the first model", lambda: window.ask("layout") == [["CPU", 0, 1]])
        for place in DROP_PLACES:
            drop_until(window, place, source, lambda: window.ask("layout") == [["CPU", 0, 2]])
            window.ask("drop", str(first))
            window.wait_for("the first model again", lambda: window.ask("layout") == [["CPU", 0, 1]])
        assert window.ask("text", "chat.prompt_edit.toPlainText") == ""
        assert window.ask("text", "model_panel.search_edit.text") == ""
        assert window.ask("bugs") == []


def bad_files(folder: Path) -> dict[str, Path]:
    """Return files that cannot be opened by a word of the sentence that says why."""
    good = write_tiny_llama(folder / "good.gguf", n_layers=2).read_bytes()
    contents = {
        "empty.gguf": b"",
        "cut.gguf": good[: len(good) // 2],
        "text.gguf": b"this is no model at all, whatever its name says",
        "huge.gguf": good[:8] + b"\xff" * 16 + good[24:],
        "layout.json": b'{"version": 1, "model": {"layers": 2}, "runs": [{"device": "CPU", "layers": "0-9"}]}',
        "other.json": b"[1, 2",
    }
    for name, content in contents.items():
        (folder / name).write_bytes(content)
    (folder / "folder.gguf").mkdir()
    return {name: folder / name for name in (*contents, "folder.gguf", "missing.gguf")}


def tells_why(window: Window, name: str) -> bool:
    said = status(window)
    return name in said and not said.endswith("…")


def test_a_bad_file_is_one_sentence_that_names_it(desktop: Desktop, tmp_path: Path) -> None:
    bad = bad_files(tmp_path)
    with open_window(desktop, tmp_path, model=tmp_path / "good.gguf") as window:
        window.wait_for("the model", lambda: window.ask("layout") == [["CPU", 0, 1]])
        for name, path in bad.items():
            window.ask("drop", str(path))
            window.wait_for(f"the reason for {name}", partial(tells_why, window, name))
            assert window.ask("layout") == [["CPU", 0, 1]]
        assert window.ask("bugs") == []


@pytest.mark.exhaustive
def test_a_rig_file_can_be_planned_with_and_says_why_it_cannot_be_loaded(desktop: Desktop, tmp_path: Path) -> None:
    model = write_tiny_llama(tmp_path / "model.gguf", n_layers=4)
    rig = tmp_path / "rig.json"
    device = {"id": "CUDA0", "backend": "CUDA", "total_bytes": "24GiB", "pci_bus_id": "0000:ff:1f.7"}
    rig.write_text(json.dumps({"version": 1, "devices": [device], "host": {"total_bytes": "64GiB"}}))
    with open_window(desktop, tmp_path, model=model, rig=rig) as window:
        window.wait_for("the proposal", lambda: window.ask("layout") == [["CUDA0", 0, 3]])
        window.click("settings_bar.load_buttons.load_button")
        window.wait_for("the reason", lambda: "The rig file has CUDA0" in status(window))
        assert window.ask("state") == "STOPPED"
        assert window.ask("bugs") == []


@pytest.mark.exhaustive
def test_a_restart_remembers_the_window_and_the_models(desktop: Desktop, tmp_path: Path) -> None:
    model = write_tiny_llama(tmp_path / "remembered.gguf", n_layers=2)
    with open_window(desktop, tmp_path, model=model) as window:
        window.wait_for("the model", lambda: window.ask("layout") is not None)
        desktop.key("alt+v", "Down", "Return")  # hides the second panel, "Last load"
        window.wait_for("the panel's end", lambda: not window.ask("visible", "load_report"))
        desktop.key("ctrl+q")
        assert window.process.wait(DEADLINE_S) == 0
    model.unlink()
    with open_window(desktop, tmp_path) as window:
        window.wait_for("the list", lambda: "remembered" in window.ask("text", "model_panel.visible_titles"))
        assert not window.ask("visible", "load_report")
        window.wait_for("its place on the screen", lambda: window.ask("text", "isActiveWindow") == "True")
        x, y, width, _ = window.ask("rect", "model_panel.list_view")
        desktop.click(x + width // 2, y + 20)
        window.wait_for("the reason", lambda: "remembered.gguf" in status(window))
        window.wait_for("a shorter list", lambda: window.ask("text", "model_panel.visible_titles") == "()")
        assert window.ask("bugs") == []

"""The data folder on a read-only file system: files are read, and a notice says what is not stored."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
from contextlib import closing
from pathlib import Path

import pytest

from app.paths import chats_path, library_path
from engine.chat.conversation import Conversation
from engine.chat.store import ChatStore
from engine.library.index import LibraryIndex
from tests.support.command_line import ROOT, Answer, program
from tests.support.patience import DEADLINE_S
from tests.support.ports import free_port
from tests.support.read_only import within_read_only
from tests.support.stores import model_bytes, put


@pytest.fixture
def data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in ("XDG_DATA_HOME", "XDG_CACHE_HOME", "XDG_CONFIG_HOME", "HOME"):
        folder = tmp_path / "data" / name.lower()
        folder.mkdir(parents=True)
        monkeypatch.setenv(name, str(folder))
    return tmp_path / "data"


def run(folder: Path, *words: str | Path) -> Answer:
    done = subprocess.run(
        within_read_only(folder, *program(), *words),
        cwd=ROOT, stdin=subprocess.DEVNULL, capture_output=True, timeout=DEADLINE_S, env=os.environ, check=False,
    )  # fmt: skip
    return Answer(done.returncode, done.stdout.decode(), done.stderr.decode())


def test_the_library_is_listed_without_an_index(tmp_path: Path, data: Path) -> None:
    put(tmp_path / "models" / "Ada-Q8_0.gguf", model_bytes())
    answer = run(data, "library", "--folder", tmp_path / "models", "--json")
    assert answer.code == 0, answer
    assert [model["name"] for model in answer.document["models"]] == ["Ada"]
    assert "index cannot be saved" in answer.err


def test_an_index_that_is_there_is_used(tmp_path: Path, data: Path) -> None:
    put(tmp_path / "models" / "Ada-Q8_0.gguf", model_bytes())
    library_path().parent.mkdir(parents=True, exist_ok=True)
    with closing(LibraryIndex(library_path())) as index:
        index.save_folders([tmp_path / "models"])
    answer = run(data, "library", "--json")
    assert answer.code == 0, answer
    assert [model["name"] for model in answer.document["models"]] == ["Ada"]
    assert "index cannot be saved" in answer.err


def test_conversations_are_listed_and_searched(tmp_path: Path, data: Path) -> None:
    with closing(ChatStore(chats_path())) as store:
        store.save(Conversation(id="one", title="About ferrets")).result()
    answer = run(data, "chat", "--list", "--json")
    assert answer.code == 0, answer
    assert "About ferrets" in answer.out
    answer = run(data, "chat", "--search", "ferrets")
    assert answer.code == 0, answer
    assert "About ferrets" in answer.out


def test_a_device_is_served_without_a_cache_of_weights(data: Path) -> None:
    command = within_read_only(data, *program(), "rig", "serve", "--port", str(free_port()))
    with subprocess.Popen(
        command, cwd=ROOT, stdin=subprocess.DEVNULL, stderr=subprocess.PIPE, env=os.environ, text=True
    ) as process:
        assert process.stderr is not None
        ending = threading.Timer(DEADLINE_S, process.kill)
        ending.start()
        told = ""
        for line in process.stderr:
            told += line
            if "caches" in line:
                process.send_signal(signal.SIGINT)
        ending.cancel()
    assert process.returncode == 0, told
    assert "is served on" in told
    assert "The worker caches no weights, because" in told

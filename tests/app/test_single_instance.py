"""A second start passes its files to the first window; other messages to the window are refused."""

from __future__ import annotations

import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from PySide6.QtCore import QCoreApplication, QDir, QEvent
from PySide6.QtGui import QFileOpenEvent
from PySide6.QtWidgets import QApplication
from pytestqt.qtbot import QtBot

from app.single_instance import FirstInstance, OpenEvents

ROOT = Path(__file__).resolve().parents[2]
SECOND = (
    "import sys; from pathlib import Path; from PySide6.QtCore import QCoreApplication;"
    "from app.single_instance import hand_over; QCoreApplication([]);"
    "print(hand_over(sys.argv[1], [Path(each) for each in sys.argv[2:]]))"
)


@pytest.fixture
def name(tmp_path: Path) -> str:
    return f"layerdeck-test-{tmp_path.name}-{abs(hash(tmp_path))}"


@pytest.fixture
def first(qtbot: QtBot, name: str) -> Iterator[FirstInstance]:
    instance = FirstInstance(name)
    assert instance.is_listening
    yield instance
    instance.close()


def start_second(name: str, *files: str) -> subprocess.Popen[str]:
    return subprocess.Popen([sys.executable, "-c", SECOND, name, *files], cwd=ROOT, stdout=subprocess.PIPE, text=True)


def test_files_of_a_second_start_arrive_with_their_whole_path(qtbot: QtBot, first: FirstInstance, name: str) -> None:
    with qtbot.waitSignal(first.asked) as asked:
        second = start_second(name, "some folder/ä model.gguf", "/other.gguf")
    assert asked.args == [[ROOT / "some folder" / "ä model.gguf", Path("/other.gguf")]]
    assert second.communicate()[0] == "True\n"


def test_a_second_start_without_files_wants_the_window(qtbot: QtBot, first: FirstInstance, name: str) -> None:
    with qtbot.waitSignal(first.asked) as asked:
        second = start_second(name)
    assert asked.args == [[]]
    assert second.communicate()[0] == "True\n"


def test_without_a_first_one_nobody_takes_them(name: str) -> None:
    assert start_second(name, "model.gguf").communicate()[0] == "False\n"


@pytest.mark.skipif(sys.platform == "win32", reason="a local socket is a named pipe there")
@pytest.mark.parametrize(
    "words", [b"no json\n", b'{"a": 1}\n', b"[1]\n", b'["\\u0000"]\n', b"\xff\xfe\n", b"[" * 5000 + b"\n"]
)
def test_what_is_no_list_of_files_is_refused_and_the_next_start_is_heard(
    qtbot: QtBot, first: FirstInstance, name: str, words: bytes
) -> None:
    with socket.socket(socket.AF_UNIX) as stranger:
        stranger.connect(str(Path(QDir.tempPath()) / name))
        stranger.sendall(words)
        with qtbot.waitSignal(first.asked) as asked:
            second = start_second(name, "/model.gguf")
        assert asked.args == [[Path("/model.gguf")]]
        assert second.communicate()[0] == "True\n"


@pytest.mark.skipif(sys.platform == "win32", reason="a named pipe goes with its process")
def test_the_socket_of_a_killed_window_is_taken_over(qtbot: QtBot, name: str) -> None:
    left = Path(tempfile.gettempdir()) / name
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(left))
    instance = FirstInstance(name)
    assert instance.is_listening
    with qtbot.waitSignal(instance.asked):
        second = start_second(name, "/model.gguf")
    assert second.communicate()[0] == "True\n"
    instance.close()


def test_a_file_that_the_system_opens_arrives_once(qtbot: QtBot, qapp: QApplication) -> None:
    events = OpenEvents(qapp)
    asked: list[list[Path]] = []
    events.asked.connect(asked.append)
    QCoreApplication.sendEvent(qapp, QFileOpenEvent("/models/ä model.gguf"))
    QCoreApplication.sendEvent(qapp, QEvent(QEvent.Type.ApplicationActivate))
    assert asked == [[Path("/models/ä model.gguf")]]
    qapp.removeEventFilter(events)
    events.setParent(None)

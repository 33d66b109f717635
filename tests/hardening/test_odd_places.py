"""Unusable home folders and environment variables: window and command line start, work, and show a notice."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from app.run_records import RunRecords
from app.settings import Settings
from tests.support.patience import DEADLINE_S
from tests.support.selection import some

pytestmark = pytest.mark.skipif(os.name != "posix", reason="these variables are those of POSIX")
ROOT = Path(__file__).parents[2]
VARIABLES = (
    "HOME", "XDG_CONFIG_HOME", "XDG_DATA_HOME", "XDG_CACHE_HOME", "XDG_STATE_HOME", "XDG_RUNTIME_DIR", "TMPDIR",
)  # fmt: skip


def _made(name: bytes) -> Callable[[bytes], bytes]:
    def make(folder: bytes) -> bytes:
        Path(os.fsdecode(folder + b"/" + name)).mkdir()
        return folder + b"/" + name

    return make


def _file(folder: bytes) -> bytes:
    Path(os.fsdecode(folder), "file").touch()
    return folder + b"/file"


def _pipe(folder: bytes) -> bytes:
    os.mkfifo(folder + b"/pipe")
    return folder + b"/pipe"


def _loop(folder: bytes) -> bytes:
    Path(os.fsdecode(folder), "loop").symlink_to("loop")
    return folder + b"/loop"


PLACES: dict[str, Callable[[bytes], bytes | None]] = {
    "unset": lambda _folder: None,
    "empty": lambda _folder: b"",
    "relative": lambda _folder: b"here/there",
    "tilde": lambda _folder: b"~/here",
    "file": _file,
    "pipe": _pipe,
    "loop": _loop,
    "device": lambda _folder: b"/dev/null",
    "missing": lambda folder: folder + b"/not/there",
    "not to be made": lambda _folder: b"/proc/nowhere",
    "blanks": _made(b" a b  "),
    "newline": _made(b"a\nb\x1b[31m"),
    "bytes": _made(b"a\xff\xfeb"),
    "long": lambda folder: folder + b"/" + b"x" * 4000,
    "deep": lambda folder: folder + b"/" + b"/".join([b"x" * 200] * 18),
}
CASES = [(variable, place) for variable in (*VARIABLES, "all") for place in PLACES]
OWN_HOME = {"unset", "empty", "relative", "tilde", "long", "deep"}
"""Places for which a home of the system takes the part of HOME: those are not tried with the user's own files."""
COMMAND = "import sys; from app.cli import main; sys.exit(main())"
WINDOW = """
import sys
from PySide6.QtCore import QTimer
from PySide6.QtWidgets import QApplication
from app.notices import Notices
from app.opening import Opening
import app.gui

say, start = Notices.show, Opening.__init__

def said(self, text, *, bad=False):
    print("said:", text.replace(chr(10), " "))
    say(self, text, bad=bad)

def started(self, *arguments):
    start(self, *arguments)
    self.opened.connect(lambda window: QTimer.singleShot(1000, lambda: end(window)))

def end(window):
    print("open:", *(each.windowTitle() for each in QApplication.topLevelWidgets() if each.isVisible()), sep="|")
    window.main.close()
    QApplication.quit()

Notices.show, Opening.__init__ = said, started
sys.exit(app.gui.main([]))
"""


def run(code: str, variable: str, place: str, folder: Path, *words: str) -> subprocess.CompletedProcess[bytes]:
    environment = {name: value for name, value in os.environb.items() if not name.startswith((b"XDG_", b"TMPDIR"))}
    for name in ("home", "cwd"):
        (folder / name).mkdir()
    environment |= {
        b"HOME": os.fsencode(folder / "home"),
        b"PYTHONPATH": os.fsencode(ROOT),
        b"QT_QPA_PLATFORM": b"offscreen",
    }
    for name in VARIABLES if variable == "all" else (variable,):
        if name == "HOME" and place in OWN_HOME:
            continue
        (folder / name).mkdir()
        value = PLACES[place](os.fsencode(folder / name))
        if value is None:
            environment.pop(name.encode(), None)
        else:
            environment[name.encode()] = value
    return subprocess.run(
        [sys.executable, "-P", "-c", code, *words],
        env=environment,
        cwd=folder / "cwd",
        stdin=subprocess.DEVNULL,
        capture_output=True,
        timeout=DEADLINE_S,
        check=False,
    )


@pytest.mark.parametrize("words", [("demo", "demo.gguf"), ("devices",), ("library",)], ids=lambda words: words[0])
@pytest.mark.parametrize(("variable", "place"), some(CASES, 1))
def test_commands_work_or_say_why_in_a_sentence(
    tmp_path: Path, variable: str, place: str, words: tuple[str, ...]
) -> None:
    done = run(COMMAND, variable, place, tmp_path, *words)
    said = done.stderr.decode("utf-8", "replace").splitlines()
    assert done.returncode == 0 or (words == ("library",) and "check the folder" in said[-1]), said
    assert "Traceback" not in "".join(said)
    assert all(len(line) < 900 for line in said)
    assert b"\x1b" not in done.stderr
    assert {path.name for path in (tmp_path / "cwd").iterdir()} == ({"demo.gguf"} if words[0] == "demo" else set())


@pytest.mark.parametrize(
    ("variable", "place"),
    [pytest.param(*case, marks=() if case == CASES[0] else pytest.mark.exhaustive) for case in some(CASES, 1)],
)
def test_the_window_opens_and_closes(tmp_path: Path, variable: str, place: str) -> None:
    done = run(WINDOW, variable, place, tmp_path)
    said = done.stdout.decode("utf-8", "replace").splitlines()
    assert done.returncode == 0, done.stderr
    assert b"Traceback" not in done.stderr
    assert "open:|Layerdeck" in said, said
    assert len(said) == len(set(said))
    assert list((tmp_path / "cwd").iterdir()) == []


def test_settings_whose_name_is_no_text_are_not_kept_under_another(tmp_path: Path) -> None:
    """Qt wrote them into a folder beside, which was called nearly the same."""
    folder = Path(os.fsdecode(os.fsencode(tmp_path) + b"/a\xff"))
    folder.mkdir()
    settings = Settings(folder / "layerdeck.ini")
    assert "is not valid text" in settings.fault
    settings.theme = "dark"
    settings.sync()
    assert settings.theme == "dark"
    assert list(tmp_path.iterdir()) == [folder]


def test_a_mark_whose_folder_went_away_ends_quietly(tmp_path: Path) -> None:
    """A home that is a file ended in a report of a bug when the window closed."""
    marks = RunRecords(tmp_path / "running")
    marks.begin()
    for path in (tmp_path / "running").iterdir():
        path.unlink()
    (tmp_path / "running").rmdir()
    (tmp_path / "running").touch()
    marks.end()

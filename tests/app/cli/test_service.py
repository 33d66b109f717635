"""`rig serve --install`: the systemd unit that it writes, the command in it, and write errors."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from app.cli.arguments import make_parser
from app.cli.service import UNIT, service_command, unit_text
from tests.support.command_line import run_here


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    # systemd is not asked in a test.
    monkeypatch.setattr("app.cli.service._systemctl", lambda *_words: False)
    return tmp_path / "config" / "systemd" / "user"


def test_a_unit_is_written_told_and_removed(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ("--host", "127.0.0.1", "--name", "100% $attic", "--cap", "CPU=64MiB", "--announce", "--port", "50099")
    written = run_here(capsys, "rig", "serve", "--secure", *options, "--install", "--json")
    assert written.code == 0, written.err
    unit = folder / UNIT
    assert written.document["unit"] == str(unit)
    assert f"systemctl --user enable --now {UNIT}" in written.document["next"]
    (command,) = [line for line in unit.read_text(encoding="utf-8").splitlines() if line.startswith("ExecStart=")]
    assert command.endswith(
        'rig serve --secure --host=127.0.0.1 --port=50099 "--name=100%% $$attic" --cap=CPU=67108864 --announce'
    )
    shown = run_here(capsys, "rig", "serve", "--install")
    assert str(unit) in shown.out
    removed = run_here(capsys, "rig", "serve", "--uninstall", "--json")
    assert removed.document == {"unit": str(unit), "removed": True}
    assert not unit.exists()
    assert run_here(capsys, "rig", "serve", "--uninstall", "--json").document["removed"] is False


def test_the_options_of_the_unit_are_those_that_were_given() -> None:
    given = ["rig", "serve", "--install", "--name=-attic", "--keep=0", "--pair"]
    command = service_command(make_parser(given).parse_args(given))
    words = command[command.index("rig") :]
    again = make_parser(words).parse_args(words)
    assert (again.name, again.keep, again.host, again.pair) == ("-attic", 0, "127.0.0.1", True)


def test_a_unit_that_cannot_be_written_is_one_sentence(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder.parent.parent.mkdir(parents=True)
    shutil.copy(__file__, folder.parent)  # a file in the place of the folder
    answer = run_here(capsys, "rig", "serve", "--install", "--json")
    assert answer.code != 0
    assert answer.error["message"].startswith(f"The unit {folder / UNIT} cannot be written (")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--install", "--uninstall"), "exclude each other"),
        (("--install", "--port", "50099"), "add --secure"),
        (("--install", "--host", "192.0.2.55"), "no interface of this computer has this address"),
        (("--install", "--cap", "CPU=9999GiB"), "is not possible: CPU has"),
        (("--host", "attic"), "no interface of this computer has this address"),
        (("--port", "1", "--device", "CPU", "--device", "CUDA0"), "Plain RPC serves one device"),
        (("--port", "1", "--cap", "CUDA0=1GiB"), "is not served"),
    ],
)
def test_what_cannot_be_served_is_told(
    folder: Path, capsys: pytest.CaptureFixture[str], options: tuple[str, ...], words: str
) -> None:
    answer = run_here(capsys, "rig", "serve", *options, "--json")
    assert (answer.code, answer.error["kind"]) == (2, "argument")
    assert words in answer.error["message"]
    assert not (folder / UNIT).exists()


def test_a_word_with_quotes_stays_one_word() -> None:
    assert 'ExecStart=/usr/bin/p "a \\"b\\" \\\\c d"\n' in unit_text(["/usr/bin/p", 'a "b" \\c\nd'])

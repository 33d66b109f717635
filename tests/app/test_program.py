"""The bundle's one executable runs as window, command line or child, depending on its name and arguments."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from app import program

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("words", [["/opt/x/layerdeck-cli", "--help"], ["/opt/x/layerdeck", "--cli", "--help"]])
def test_it_is_the_command_line(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        program.main(words)
    assert ended.value.code == 0
    assert capsys.readouterr().out.startswith("usage: layerdeck-cli")


def test_it_is_the_window(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        program.main(["/opt/x/layerdeck", "--help"])
    assert capsys.readouterr().out.startswith("usage: layerdeck ")


def test_it_is_a_child_that_greets_and_ends_with_its_input() -> None:
    child = subprocess.run(
        [sys.executable, "-m", "app.program", "--worker", "probe"], cwd=ROOT, input=b"", capture_output=True, check=True
    )
    assert json.loads(child.stdout.splitlines()[0])["type"] == "hello"


@pytest.mark.parametrize("before", [{}, {"LD_LIBRARY_PATH": "/opt/mine"}], ids=["none", "a path of people's own"])
def test_what_the_bundle_starts_finds_the_systems_libraries(before: dict[str, str]) -> None:
    kept = {f"{name}_ORIG": value for name, value in before.items()}
    environ = {"HOME": "/home/x", "LD_LIBRARY_PATH": "/bundle/_internal", **kept}
    program.restore_library_path(environ)
    assert environ == {"HOME": "/home/x", "PYINSTALLER_RESET_ENVIRONMENT": "1", **before}

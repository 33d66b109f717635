"""The command line of make.py: commands, passed arguments, and refused ones."""

from __future__ import annotations

import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

import make
from resources.setup.errors import SetupError


def test_options_after_the_command_are_passed_on() -> None:
    assert make.parse_command(["test", "-k", "layout", "--co", "-q"]) == ("test", ["-k", "layout", "--co", "-q"])
    assert make.parse_command(["run", "--theme", "dark", "a.gguf"]) == ("run", ["--theme", "dark", "a.gguf"])


def test_tests_run_on_all_cores_unless_the_caller_says_otherwise() -> None:
    command = make.pytest_command(["-n", "0", "tests/test_make.py"])
    assert command[1:] == ["-m", "pytest", "--numprocesses=auto", "--dist=worksteal", "-n", "0", "tests/test_make.py"]


def test_backend_is_taken_out_of_the_arguments() -> None:
    assert make.take_backend(["-k", "load", "--backend", "vulkan", "-x"]) == ("vulkan", ["-k", "load", "-x"])
    assert make.take_backend(["--backend=cpu"]) == ("cpu", [])
    assert make.take_backend(["--back", "cpu"]) == (None, ["--back", "cpu"])


def test_unknown_backend_and_loose_words_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        make.take_backend(["--backend", "vulcan"])
    assert "'vulcan'" in capsys.readouterr().err
    with pytest.raises(SetupError, match="now means nothing here"):
        make.run_setup(["now"])


def test_unknown_command_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        make.parse_command(["build"])
    assert caught.value.code == 2
    assert "invalid choice: 'build'" in capsys.readouterr().err


def test_benchmarks_that_need_an_argument_run_only_by_themselves() -> None:
    needed = re.compile(r"add_argument\(\"[a-z](?!.*(nargs|default)=)")
    modules = (ROOT / "benchmarks").glob("[!_]*.py")
    assert {path.stem for path in modules if needed.search(path.read_text(encoding="utf-8"))} <= {*make.NEED_MORE}


def test_unknown_benchmark_is_refused_before_any_set_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(make, "set_up", lambda **_: pytest.fail("set up for nothing"))
    with pytest.raises(SetupError, match="No benchmark is called no_such"):
        make.run_benchmarks(["no_such"])


ROOT = Path(make.__file__).parent


def test_bare_python_has_all_that_it_stands_on(tmp_path: Path) -> None:
    """Without site-packages, from another folder."""
    done = subprocess.run(
        [sys.executable, "-S", str(ROOT / "make.py"), "--help"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert all(command in done.stdout for command in make.COMMANDS)


def test_older_python_gets_one_sentence(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "version_info", (3, 10, 9))
    with pytest.raises(SystemExit) as caught:
        runpy.run_path(str(ROOT / "make.py"), run_name="__main__")
    assert caught.value.code == 2
    sentence = capsys.readouterr().err
    assert sentence.startswith("Layerdeck needs Python 3.11 or later; this is ")
    assert sentence.count("\n") == 1

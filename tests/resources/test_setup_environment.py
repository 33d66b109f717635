"""The virtual environment: when it is up to date, how it is created and filled."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from resources.setup.build_plan import ENGINE
from resources.setup.environment import compile_modules, install, require_venv
from resources.setup.errors import SetupError
from resources.setup.places import venv_program
from resources.setup.stamp import is_set_up, read_stamp, setup_digest
from resources.setup.unfinished import being_written


def test_finished_set_up_is_recognised_and_only_for_the_same_inputs() -> None:
    inputs = (b"[project]", Path("here"), "3.11", "auto", "", ())
    digest = setup_digest(*inputs)
    stamp = {"digest": digest, "tests": "no"}
    assert is_set_up(stamp, digest, tests=False)
    assert not is_set_up(stamp, digest, tests=True)
    assert is_set_up({**stamp, "tests": "yes"}, digest, tests=True)
    assert not is_set_up({}, digest, tests=False)
    for index, other in enumerate((b"[other]", Path("there"), "3.12", "vulkan", "-DX=1", ("-mno-amx-tile",))):
        changed = (*inputs[:index], other, *inputs[index + 1 :])
        assert setup_digest(*changed) != digest  # type: ignore[arg-type]


@pytest.mark.parametrize("text", ["", "{", "[]", "\0\0"])
def test_broken_stamp_is_no_stamp(text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept = tmp_path / "stamp.json"
    monkeypatch.setattr("resources.setup.stamp.STAMP", kept)
    assert read_stamp() == {}
    kept.write_text(text, encoding="utf-8")
    assert read_stamp() == {}


def test_modules_are_compiled_whatever_the_environment_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("resources.setup.environment.ROOT", tmp_path)
    monkeypatch.setattr("resources.setup.environment.venv_program", lambda _: sys.executable)
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")
    for folder, text in {"engine": "A = 1\n", "app": "A = \n", "widgets": "A = 1\n"}.items():
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "m.py").write_text(text, encoding="utf-8")
    compile_modules()
    assert sorted(path.parents[1].name for path in tmp_path.rglob("*.pyc")) == ["engine", "widgets"]


@pytest.mark.parametrize("works", [True, False])
def test_uv_is_used_where_it_is_there_and_pip_where_it_fails(
    works: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran: list[list[str]] = []

    def run(command: list[str], **_kwargs: object) -> subprocess.CompletedProcess[bytes]:
        ran.append(list(command))
        return subprocess.CompletedProcess(command, 0 if works or command[0] != "uv" else 2)

    monkeypatch.setattr("resources.setup.uv.find_uv", lambda: "uv")
    monkeypatch.setattr(subprocess, "run", run)
    install(tmp_path / "engine.whl", tests=True, reinstall=True)
    assert ran[0][:4] == ["uv", "--quiet", "pip", "install"]
    assert ENGINE in ran[0]
    assert str(tmp_path / "engine.whl") in ran[0]
    assert len(ran) == (1 if works else 3)
    assert all("pip" in command for command in ran)


@pytest.mark.parametrize(
    ("said", "sentence"),
    [
        (
            "ERROR: Could not find a version that satisfies numpy",
            "something could not be downloaded; look at the network",
        ),
        ("OSError: [Errno 28] No space left on device", "the disk is full; free about 1 GB and start again"),
        ("ERROR: what nobody knows", "what pip said is above; start again"),
    ],
    ids=["network", "disk", "unknown"],
)
def test_dependencies_that_cannot_be_installed_end_with_cause_and_remedy(
    said: str, sentence: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pip = tmp_path / "python"
    pip.write_text(f"#!{sys.executable}\nimport sys\nsys.exit({said!r})\n", encoding="utf-8")
    pip.chmod(0o755)
    monkeypatch.setattr("resources.setup.environment.venv_program", lambda _name: pip)
    monkeypatch.setattr("resources.setup.uv.find_uv", lambda: None)
    with pytest.raises(SetupError) as raised:
        install(tmp_path / "engine.whl", tests=False, reinstall=False)
    first, last = str(raised.value).splitlines()
    assert first == said
    assert last.startswith(f"Installing the dependencies failed: {sentence}")


def test_environment_that_was_stopped_half_written_is_made_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    unfinished = tmp_path / "build" / "mark"
    for module in ("environment", "places"):
        monkeypatch.setattr(f"resources.setup.{module}.VENV", tmp_path / ".venv")
    monkeypatch.setattr("resources.setup.environment.STAMP", tmp_path / ".venv" / "stamp.json")
    monkeypatch.setattr("resources.setup.environment.UNFINISHED", unfinished)
    pip = venv_program("pip")
    pip.parent.mkdir(parents=True)
    pip.touch()
    monkeypatch.setattr("resources.setup.environment.output_of", lambda _: "{}.{}".format(*sys.version_info[:2]))
    monkeypatch.setattr("resources.setup.uv.find_uv", lambda: None)
    made: list[str] = []

    def create(command: Sequence[str], _failed: str) -> None:
        assert unfinished.exists()
        made.append(command[2])

    monkeypatch.setattr("resources.setup.environment.call", create)
    require_venv()
    assert made == [], "it is whole"
    with pytest.raises(KeyboardInterrupt), being_written(unfinished):
        raise KeyboardInterrupt
    require_venv()
    require_venv()
    assert made == ["venv"]
    with pytest.raises(SetupError), being_written(unfinished):
        raise SetupError("no network")
    require_venv()
    assert made == ["venv"], "what failed by itself is whole as far as it came"

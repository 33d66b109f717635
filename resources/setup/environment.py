"""The virtual environment .venv: created, filled with packages, and its modules compiled."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from resources.setup.build_plan import ENGINE
from resources.setup.errors import SetupError
from resources.setup.failures import explain
from resources.setup.places import FOLDERS, ROOT, UNFINISHED, VENV, venv_program
from resources.setup.stamp import STAMP
from resources.setup.steps import call, output_of, say
from resources.setup.unfinished import being_written
from resources.setup.uv import try_uv

UNKNOWN_TO_PIP = ("what pip said is above", "start again; if it ends the same, remove the folder .venv first")


def require_venv() -> None:
    """Create .venv if it is missing, incomplete or of another Python version."""
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
    pip = _pip_install()
    say("Installing dependencies")
    project = f"{ROOT}[dev]" if tests else str(ROOT)
    anew = ["--reinstall-package", ENGINE] if reinstall else []
    uv = ["pip", "install", "--python", str(venv_program("python")), *anew]
    if try_uv([*uv, str(wheel), "--editable", project]):
        return
    if reinstall:  # pip takes a wheel of an installed version for the same, whatever its build options
        call_pip([*pip, "--no-deps", "--force-reinstall", str(wheel)])
    call_pip([*pip, str(wheel), "--editable", project])


def install_packages(packages: Sequence[str]) -> None:
    """Install packages into .venv that are not there yet."""
    if not try_uv(["pip", "install", "--python", str(venv_program("python")), *packages]):
        call_pip([*_pip_install(), *packages])


def _pip_install() -> list[str]:
    return [str(venv_program("python")), "-m", "pip", "--quiet", "--disable-pip-version-check", "install"]


def call_pip(command: Sequence[str]) -> None:
    """Run pip.

    Raises:
        SetupError: pip failed. The text has its output, the cause and the remedy.
    """
    done = subprocess.run(
        command, cwd=ROOT, stdin=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, errors="replace", check=False
    )
    if done.returncode != 0:
        cause, remedy = explain(done.stderr, UNKNOWN_TO_PIP)
        sentence = f"Installing the dependencies failed: {cause}; {remedy}."
        raise SetupError("\n".join([done.stderr.rstrip(), sentence]), exit_code=1)


def compile_modules() -> None:
    """Compile our modules to bytecode once.

    Many processes start, and in some environments they are not allowed to write bytecode themselves.
    """
    command = [str(venv_program("python")), "-m", "compileall", "-q", *FOLDERS]
    subprocess.run(command, cwd=ROOT, stdin=subprocess.DEVNULL, check=False)  # what is wrong shows where it is used


def check_engine() -> None:
    """Let a new engine test itself on this machine's devices. Features that fail are not used; the set-up goes on."""
    say("Checking what of the engine works on this machine, once for each build")
    command = [str(venv_program("layerdeck-cli")), "doctor", "--engine"]
    done = subprocess.run(command, cwd=ROOT, stdin=subprocess.DEVNULL, check=False)
    if done.returncode != 0:
        say("What was found wrong is not used. `layerdeck-cli doctor` looks again.")

#!/usr/bin/env python3
"""Set-up and daily commands: from a fresh clone to a running window or a test run. Needs only the standard library.

`python3 make.py run` and `python3 make.py test` install what is missing, and build llama-cpp-python once for this
machine; the wheel is kept in the user's cache folder. Later calls find the stamp in .venv and start at once. The steps
are in `resources/setup`.
"""

import argparse
import os
import platform
import signal
import subprocess
import sys
from collections.abc import Sequence
from types import FrameType

if sys.version_info < (3, 11):  # noqa: UP036 - said before what an older one cannot read is imported
    print("Layerdeck needs Python 3.11 or later; this is %s." % platform.python_version(), file=sys.stderr)  # noqa: UP031
    sys.exit(2)

from resources.packs.command import run_pack
from resources.setup.beside import use_engine
from resources.setup.build_plan import BACKENDS
from resources.setup.debian import BUNDLE_PACKAGES, has_debian_packages, require_packages
from resources.setup.environment import compile_modules
from resources.setup.errors import SetupError
from resources.setup.follow import run_follow
from resources.setup.places import ROOT, venv_program
from resources.setup.steps import call, say
from resources.setup.whole import set_up


def run_setup(arguments: Sequence[str]) -> int:
    """Set up again, also if a set-up was finished before: after a new card or toolkit."""
    backend, others = take_backend(arguments)
    if others:
        raise SetupError(f"make.py setup takes --backend and nothing else; {' '.join(others)} means nothing here.")
    if backend is not None:
        os.environ["LAYERDECK_BACKEND"] = backend
    set_up(tests=False, force=True)
    return 0


def take_backend(arguments: Sequence[str]) -> tuple[str | None, list[str]]:
    """Return the value of `--backend` (None without it), and the other arguments."""
    parser = argparse.ArgumentParser(prog="make.py", add_help=False, allow_abbrev=False)
    parser.add_argument("--backend", choices=BACKENDS)
    options, others = parser.parse_known_args(arguments)
    return options.backend, others


def run_window(arguments: Sequence[str]) -> int:
    """Start the window. Paths in `arguments` are relative to the caller's folder."""
    set_up(tests=False)
    return replace_process([str(venv_program("layerdeck")), *arguments])


def replace_process(command: Sequence[str]) -> int:
    """Replace this process by `command`, so that signals reach the command.

    On Windows a replaced process would be detached, so there the command runs as a child until it ends.
    """
    if sys.platform != "win32":
        os.execv(command[0], list(command))
    return subprocess.run(command, check=False).returncode


def run_tests(arguments: Sequence[str]) -> int:
    """Run the tests, without a display."""
    backend, arguments = take_backend(arguments)
    set_up(tests=True)
    compile_modules()
    # Else each worker compiles all tests anew in each run, which takes 15 seconds.
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    os.environ.setdefault("QT_QPA_PLATFORM", "offscreen")
    os.chdir(ROOT)
    if backend is not None:
        arguments = [f"--engine={use_engine(backend)}", *arguments]
    return replace_process(pytest_command(arguments))


def pytest_command(arguments: Sequence[str]) -> list[str]:
    """Return the pytest command for all cores.

    `arguments` come last, since pytest uses the last of two equal options.
    """
    return [str(venv_program("python")), "-m", "pytest", "--numprocesses=auto", "--dist=worksteal", *arguments]


def run_checks(_arguments: Sequence[str]) -> int:
    """Run the checks of format, lint, types and imports; all of them run, even if one fails."""
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


def run_translation_check(_arguments: Sequence[str]) -> int:
    """List missing translations and wrong ones. A release must have none."""
    set_up(tests=False)
    command = [str(venv_program("python")), "-m", "resources.languages.extract", "--check"]
    return subprocess.run(command, cwd=ROOT, check=False).returncode


NEED_MORE = (
    "against_llama_bench", "against_llama_server", "bundle_start", "hour_of_use", "killed_windows", "machine_faults",
    "mutated_loads", "step_widths",
)  # fmt: skip
"""Benchmarks that run only with `python -m benchmarks.NAME`: they need an argument, another program or the bundle."""


def run_benchmarks(arguments: Sequence[str]) -> int:
    """Run the named benchmarks; all of them if none is named."""
    names = {path.stem for path in (ROOT / "benchmarks").glob("*.py") if not path.stem.startswith("_")}
    available = sorted(names - {"soak"})  # it has its own command
    if unknown := [name for name in arguments if name not in available]:
        raise SetupError(f"No benchmark is called {', '.join(unknown)}; there are {', '.join(available)}.")
    set_up(tests=True)
    compile_modules()
    codes = [
        subprocess.run([str(venv_program("python")), "-m", f"benchmarks.{name}"], cwd=ROOT, check=False).returncode
        for name in arguments or [name for name in available if name not in NEED_MORE]
    ]
    return max(codes, default=0)


def run_soak(arguments: Sequence[str]) -> int:
    """Use a window for an hour, and check that its memory and processes do not grow (`benchmarks/soak.py`)."""
    set_up(tests=True)
    command = [str(venv_program("python")), "-m", "benchmarks.soak", *arguments]
    return subprocess.run(command, cwd=ROOT, check=False).returncode


def run_bundle(_arguments: Sequence[str]) -> int:
    """Build the bundle, which needs no installed Python, in `dist/`: folder, tarball, and on Debian a package."""
    set_up(tests=False)
    if run_translation_check(()) != 0:
        raise SetupError("Translations are missing or wrong; a bundle has none of these.")
    if has_debian_packages():
        require_packages(BUNDLE_PACKAGES)
    python = str(venv_program("python"))
    call([python, "-m", "pip", "install", "--quiet", "--editable", f"{ROOT}[bundle]"], "PyInstaller could not be had.")
    use_engine("portable")
    return subprocess.run([python, "-m", "resources.bundle.build"], cwd=ROOT, check=False).returncode


COMMANDS = {
    "setup": (run_setup, "look at this machine again, install and build what is missing; --backend NAME chooses"),
    "run": (run_window, "start Layerdeck; arguments go to it"),
    "test": (
        run_tests,
        "run the tests (--all: the long ones too; --backend vulkan or cuda: that engine's); arguments go to pytest",
    ),
    "check": (run_checks, "check format, lint, types and imports"),
    "check-translations": (
        run_translation_check,
        "list texts without a translation, and wrong translations",
    ),
    "bench": (run_benchmarks, "run the benchmarks named, or all"),
    "bundle": (run_bundle, "make the application that needs no Python, in dist/"),
    "pack": (run_pack, "build a backend (vulkan, cuda, hip) as a pack for the bundle's engine, in dist/"),
    "soak": (run_soak, "use a window for an hour (--minutes N) and look at what it keeps"),
    "follow": (run_follow, "record the zoo with another version of the engine and print what moved"),
}


def parse_command(arguments: Sequence[str]) -> tuple[str, list[str]]:
    """Return the command, and the arguments that are passed on to it."""
    parser = argparse.ArgumentParser(
        prog="make.py",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        description="\n".join(f"{name:18} {text}" for name, (_, text) in COMMANDS.items()),
    )
    parser.add_argument("command", choices=COMMANDS)
    parser.add_argument("arguments", nargs=argparse.REMAINDER)
    options = parser.parse_args(arguments)
    return options.command, options.arguments


def raise_interrupt(_number: int, _frame: FrameType | None) -> None:
    """Signal handler that raises `KeyboardInterrupt`, as Ctrl-C does.

    A build is then stopped with its compilers, and the next build continues it.
    """
    raise KeyboardInterrupt


def main(arguments: Sequence[str]) -> int:
    """Run one command and return its exit code."""
    command, rest = parse_command(arguments)
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

"""Modules that each command imports: commands that do little import little."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.models import write_tiny_llama

ROOT = Path(__file__).resolve().parents[3]
RUN = """
import sys
from app.cli import main
try:
    code = main(sys.argv[1:])
except SystemExit as ended:
    code = ended.code
assert not code, code
sys.stderr.write("\\n".join(sys.modules))
"""
HEAVY = {"PySide6", "gguf", "llama_cpp", "numpy", "platformdirs", "psutil", "pynvml"}


def imported(*words: str) -> set[str]:
    """Return the modules that are there after a command."""
    done = subprocess.run([sys.executable, "-c", RUN, *words], cwd=ROOT, capture_output=True, text=True, check=True)
    return set(done.stderr.split())


@pytest.mark.parametrize("words", [("--help",), ("inspect", "--help")])
def test_help_imports_neither_the_engine_nor_any_package(words: tuple[str, ...]) -> None:
    modules = imported(*words)
    assert not modules & (HEAVY | {"msgspec", "dataclasses", "logging", "json"})
    assert {name for name in modules if name.startswith("engine.")} == {
        "engine.base",
        "engine.base.errors",
        "engine.base.language",
        "engine.base.texts",
        "engine.base.units",
    }


def test_inspect_imports_what_reads_a_model(tmp_path: Path) -> None:
    modules = imported("inspect", str(write_tiny_llama(tmp_path / "m.gguf", n_layers=1)))
    packages = {".".join(name.split(".")[:3]) for name in modules if name.startswith("engine.")}
    assert not modules & HEAVY
    assert not packages & {
        "engine.model.demo",
        "engine.planning.fit",
        "engine.runtime.process",
        "engine.runtime.session",
        "engine.devices.telemetry",
        "engine.runtime.child",
    }
    assert not {name for name in modules if name.startswith("engine.planning.memory.compute_graph")}


@pytest.mark.parametrize("command", ["inspect", "devices", "plan", "load", "embed", "rig", "demo", "doctor"])
def test_every_command_has_its_own_help(command: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", RUN, command, "--help"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert f"layerdeck-cli {command}" in done.stdout

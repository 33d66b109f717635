"""Messages of the set-up: all missing requirements at once, measured durations, causes of a failed build."""

from __future__ import annotations

from pathlib import Path

import pytest

from resources.setup.failures import FAILURES, UNKNOWN, explain
from resources.setup.machine import has_compiler
from resources.setup.missing import NEEDED_BYTES, find_missing, sentence
from resources.setup.times import format_duration, keep_time, read_times, told_duration

REAL_LOGS = {
    "the disk is full": "/usr/bin/ld: final link failed: No space left on device",
    "the compiler ran out of memory": "g++: fatal error: Killed signal terminated program cc1plus",
    "something could not be downloaded": "ERROR: Could not find a version that satisfies the requirement ninja>=1.5",
    "this CUDA toolkit does not know so new a compiler": "#error -- unsupported GNU version! later than 12",
    "this CUDA toolkit does not know this card": "nvcc fatal   : Unsupported gpu architecture 'compute_120'",
    "parts of Vulkan are missing": "Could NOT find Vulkan (missing: Vulkan_LIBRARY glslc) (found version)",
    "ROCm is missing or incomplete": '  Could not find a package configuration file provided by "hip" with any of',
    "the compiler does not work": "  No CMAKE_CXX_COMPILER could be found.",
    "the compiler is too old": "g++: error: unrecognized command line option '-mavx512fp16'",
    "a file or folder cannot be written": "error: could not create 'build': Permission denied",
}
"""What these tools print."""


@pytest.mark.parametrize("cause", REAL_LOGS)
def test_a_failed_build_has_its_cause(cause: str) -> None:
    found, remedy = explain(f"[1/200] Building\n{REAL_LOGS[cause]}\nninja: build stopped: subcommand failed.\n")
    assert found == cause
    assert remedy


def test_every_cause_is_tried_and_nothing_is_guessed() -> None:
    assert {cause for _, cause, _ in FAILURES} == set(REAL_LOGS)
    assert explain("ninja: build stopped: subcommand failed.") == UNKNOWN


def test_all_that_is_missing_is_said_at_once() -> None:
    missing = find_missing(
        "linux", "hip", has_compiler=False, has_venv=False, free_bytes=NEEDED_BYTES - 1, which=lambda _name: None
    )
    text = sentence(missing)
    for words in ("C++ compiler: install g++", "ensurepip", "hipcc", "999 MB are free", "nothing was built yet"):
        assert words in text
    assert find_missing("linux", "cpu", has_compiler=True, has_venv=True, free_bytes=NEEDED_BYTES) == []


def test_duration_is_in_minutes_and_seconds() -> None:
    assert format_duration(59.4) == "59 s"
    assert format_duration(185) == "3 min 5 s"


def test_a_time_is_the_one_measured_here(tmp_path: Path) -> None:
    assert (
        told_duration("cpu", 2, read_times(tmp_path)) == "about 3 min 20 s on 2 cores, which was not measured here yet"
    )
    keep_time(tmp_path, "cpu", 100.04)
    keep_time(tmp_path, "cuda", 30.0)
    times = read_times(tmp_path)
    assert told_duration("cpu", 2, times) == "1 min 40 s the last time"
    assert told_duration("cuda", 2, times) == "30 s the last time"
    assert told_duration("vulkan", 2, times) == "about 5 min 25 s, by what the plain one took here"


@pytest.mark.parametrize("text", ["", "[1]", '{"cpu": "soon"}', '{"cpu": null}'])
def test_times_that_cannot_be_read_are_none(text: str, tmp_path: Path) -> None:
    (tmp_path / "build-times.json").write_text(text)
    assert read_times(tmp_path) == {}


def test_windows_without_visual_studio_is_told_so_before_anything_is_built(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for variable in ("CXX", "CC"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("PROGRAMFILES(X86)", str(tmp_path))
    assert not has_compiler("win32")
    told = sentence(find_missing("win32", "cpu", has_compiler=False, has_venv=True, free_bytes=NEEDED_BYTES))
    assert "a C++ compiler: install the Visual Studio Build Tools with C++" in told
    asked = tmp_path / "Microsoft Visual Studio" / "Installer" / "vswhere.exe"
    asked.parent.mkdir(parents=True)
    asked.write_text("#!/bin/sh\necho there\n")
    asked.chmod(0o755)
    assert has_compiler("win32")
    assert not has_compiler("linux")

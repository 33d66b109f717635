"""The window in other languages and scaled: German, and two generated ones (longer texts, right to left).

Tables of texts are built when modules are imported. So each language has a process of its own, which runs the tests of
`test_any_language.py` and others.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType

import pytest
from _pytest.mark.structures import ParameterSet

from tests.support.spoken import ENVIRONMENT

SMALL = "tests/app/window/test_accessibility.py::test_a_small_screen_cuts_nothing"
WINDOW = (SMALL, "tests/app/window/test_any_language.py")
MOUSE = "tests/widgets/layout_editor/test_editor_mouse.py"
TESTS = {
    "de": WINDOW,
    "en-XA": WINDOW,
    "ar-XB": WINDOW,
    # English from right to left: the mouse finds what is painted.
    "ar": (MOUSE,),
}
SCALED = {"1.5": ("en-XA", (SMALL,)), "2": ("ar", (SMALL, MOUSE))}
"""Language and tests by how many pixels of the screen are one of the window's."""
LONG_S = 600


def every_day(names: Iterable[str], chosen: str) -> list[ParameterSet]:
    """Return `names` as cases of which the everyday run has `chosen`: each takes a process and a window."""
    return [pytest.param(name, marks=() if name == chosen else pytest.mark.exhaustive) for name in names]


@pytest.mark.parametrize("name", every_day(TESTS, "en-XA"))
def test_the_window_holds_in_another_language(name: str) -> None:
    run_spoken(name, TESTS[name])


@pytest.mark.parametrize("factor", every_day(SCALED, "2"))
def test_the_window_holds_on_a_scaled_screen(factor: str) -> None:
    run_spoken(*SCALED[factor], {"QT_SCALE_FACTOR": factor})


def run_spoken(name: str, tests: Sequence[str], environment: Mapping[str, str] = MappingProxyType({})) -> None:
    """Run `tests` in a process that speaks the language `name`."""
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "tests.support.spoken",
        "-p",
        "no:cacheprovider",
        *tests,
    ]
    ended = subprocess.run(
        command,
        env={**os.environ, ENVIRONMENT: name, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=LONG_S,
        check=False,
    )
    assert ended.returncode == 0, ended.stdout[-8000:]

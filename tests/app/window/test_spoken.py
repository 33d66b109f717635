"""The window in other languages: German, and two that are made up (longer texts, from right to left).

Tables of texts are made when modules are imported, so that each language has a process of its own, which runs tests
that hold in any language.
"""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.support.spoken import ENVIRONMENT

WINDOW = (
    "tests/app/window/test_accessibility.py::test_a_small_screen_cuts_nothing",
    "tests/app/window/test_any_language.py",
)
TESTS = {
    "de": WINDOW,
    "en-XA": WINDOW,
    "ar-XB": WINDOW,
    # English from right to left: the mouse finds what is painted.
    "ar": ("tests/widgets/layout_editor/test_editor_mouse.py",),
}
LONG_S = 600


@pytest.mark.parametrize("name", TESTS)
def test_the_window_holds_in_another_language(name: str) -> None:
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "tests.support.spoken",
        "-p",
        "no:cacheprovider",
        *TESTS[name],
    ]
    ended = subprocess.run(
        command,
        env={**os.environ, ENVIRONMENT: name},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=LONG_S,
        check=False,
    )
    assert ended.returncode == 0, ended.stdout[-8000:]

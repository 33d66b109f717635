"""Environment variables that name unusable folders."""

from __future__ import annotations

import os
import pwd
import sys
from pathlib import Path

import pytest

from app.surroundings import repair_home

pytestmark = pytest.mark.skipif(os.name != "posix", reason="these variables are those of POSIX")
HOME = pwd.getpwuid(os.getuid()).pw_dir if sys.platform != "win32" else ""


def test_what_is_in_order_stays(tmp_path: Path) -> None:
    environment = {"HOME": str(tmp_path), "XDG_DATA_HOME": str(tmp_path / "not there"), "TMPDIR": "x"}
    before = dict(environment)
    assert repair_home(environment) == ""
    assert environment == before


@pytest.mark.parametrize("home", ["~/x", "x", ".", "/" + "x" * 300, "/x" * 2000, "~"])
def test_a_home_that_is_none_gives_way_to_that_of_the_user(home: str) -> None:
    environment = {"HOME": home}
    sentence = repair_home(environment)
    assert environment["HOME"] == HOME
    assert "HOME=" in sentence
    assert len(sentence) < 300


@pytest.mark.parametrize("environment", [{}, {"HOME": ""}])
def test_no_home_is_nothing_to_talk_about(environment: dict[str, str]) -> None:
    assert repair_home(environment) == ""
    assert environment == {"HOME": HOME}


def test_a_user_whom_nobody_knows_has_no_home(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a container: Path.home() raised, and others made a folder named `~`."""

    def unknown(_uid: int) -> None:
        raise KeyError

    monkeypatch.setattr(pwd, "getpwuid", unknown)
    environment = {"XDG_DATA_HOME": "", "XDG_CACHE_HOME": "rel\x1b"}
    assert (
        repair_home(environment)
        == "These environment variables were ignored, because their paths are relative or too long: "
        'XDG_CACHE_HOME="rel\\x1b". Correct or unset them.'
    )
    assert environment == {"HOME": "/"}

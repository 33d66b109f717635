"""Files of API keys: readable only by their owner, read strictly, replaced in one step."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from app.serving.address import address_error, own_names, reached_url
from app.serving.key_file import MIN_KEY_CHARACTERS, read_keys, replace_keys
from engine.base.errors import ArgumentError


def test_a_missing_file_is_made_for_its_owner_alone_and_read_again(tmp_path: Path) -> None:
    made = read_keys(tmp_path / "key", "Key")
    assert made.is_new
    assert stat.S_IMODE((tmp_path / "key").stat().st_mode) == 0o600
    again = read_keys(tmp_path / "key", "Key")
    assert again.keys == made.keys
    assert not again.is_new
    assert not again.is_exposed


def test_a_new_key_replaces_all_old_ones_and_leaves_no_file_beside(tmp_path: Path) -> None:
    path = tmp_path / "key"
    path.write_text(f"{'a' * 20}\n{'b' * 20}\n")
    path.chmod(0o644)
    assert read_keys(path, "Key").is_exposed == (os.name == "posix")
    fresh = replace_keys(path, "Key")
    assert read_keys(path, "Key").keys == fresh.keys
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert [each.name for each in tmp_path.iterdir()] == ["key"]


@pytest.mark.parametrize("text", ["short\n", "a" * 20 + " b\n", "ä" * 20, "# only a comment\n", "a" * (65 << 10)])
def test_what_is_no_key_is_refused_and_stays(tmp_path: Path, text: str) -> None:
    path = tmp_path / "key"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(ArgumentError, match=r"^Key: "):
        read_keys(path, "Key")
    assert path.read_text(encoding="utf-8") == text
    assert MIN_KEY_CHARACTERS == 16


def test_a_file_that_cannot_be_replaced_keeps_its_key(tmp_path: Path) -> None:
    folder = tmp_path / "key"
    folder.mkdir()
    (folder / "in the way").touch()
    with pytest.raises(ArgumentError, match="cannot be used"):
        replace_keys(folder, "Key")
    assert [each.name for each in tmp_path.iterdir()] == ["key"]


def test_addresses_that_others_reach_need_a_key_and_a_word() -> None:
    for host in ("127.0.0.1", "::1", "localhost"):
        assert address_error(host, plain=False, needs_key=False) == ""
        assert own_names(host) == frozenset()
    assert "Require the key" in address_error("0.0.0.0", plain=True, needs_key=False)
    assert "unencrypted" in address_error("192.0.2.1", plain=False, needs_key=True)
    assert address_error("0.0.0.0", plain=True, needs_key=True) == ""
    assert "0.0.0.0" in own_names("0.0.0.0")


def test_programs_of_this_computer_are_told_an_address_that_they_reach() -> None:
    assert reached_url("0.0.0.0", 8080) == "http://127.0.0.1:8080"
    assert reached_url("::", 8080) == "http://[::1]:8080"
    assert reached_url("::1", 8080) == "http://[::1]:8080"
    assert reached_url("localhost", 8080) == "http://localhost:8080"

"""Access tokens: stored in the keyring or for the session, read from other programs, sent only to the right hub."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import keyring
import keyring.backend
import keyring.backends.fail
import keyring.errors
import pytest

from engine.base.errors import ArgumentError
from engine.library.hub.settings import HubSettings
from engine.library.hub.tokens import TokenStore

HUB = HubSettings("https://huggingface.co")
MIRROR = HubSettings("https://mirror.example", trusted=False)


class _InMemory(keyring.backend.KeyringBackend):
    priority = 1.0

    def __init__(self, kept: dict[tuple[str, str], str]) -> None:
        self.kept = kept

    def get_password(self, service: str, username: str) -> str | None:
        return self.kept.get((service, username))

    def set_password(self, service: str, username: str, password: str) -> None:
        self.kept[service, username] = password

    def delete_password(self, service: str, username: str) -> None:
        del self.kept[service, username]


@pytest.fixture
def backend() -> Iterator[_InMemory]:
    before = keyring.get_keyring()
    found = _InMemory({})
    keyring.set_keyring(found)
    yield found
    keyring.set_keyring(before)


@pytest.fixture
def no_backend() -> Iterator[None]:
    before = keyring.get_keyring()
    keyring.set_keyring(keyring.backends.fail.Keyring())  # type: ignore[no-untyped-call]
    yield
    keyring.set_keyring(before)


def test_the_keyring_keeps_it_for_the_next_session(backend: _InMemory) -> None:
    assert TokenStore({}).keep(HUB, " hf_mine ") == "keyring"
    assert TokenStore({}).locate(HUB) == ("keyring", "hf_mine")
    assert TokenStore({}).find(MIRROR) is None
    assert TokenStore({"HF_TOKEN": "hf_named"}).forget(HUB) == "environment"
    assert TokenStore({}).find(HUB) is None
    assert TokenStore({}).forget(HUB) is None


def test_a_keyring_that_removes_nothing_is_told(backend: _InMemory, monkeypatch: pytest.MonkeyPatch) -> None:
    TokenStore({}).keep(HUB, "hf_mine")

    def refuse(*_words: str) -> None:
        raise keyring.errors.PasswordDeleteError

    monkeypatch.setattr(backend, "delete_password", refuse)
    assert TokenStore({}).forget(HUB) == "keyring"


def test_without_a_keyring_it_is_for_the_session(no_backend: None) -> None:
    store = TokenStore({})
    assert store.keep(HUB, "hf_mine") == "session"
    assert store.locate(HUB) == ("session", "hf_mine")
    assert TokenStore({}).find(HUB) is None


def test_what_other_programs_left_is_for_their_hub(no_backend: None, tmp_path: Path) -> None:
    (tmp_path / "token").write_text("hf_filed\n")
    assert TokenStore({"HF_HOME": str(tmp_path)}).locate(HUB) == ("file", "hf_filed")
    named = TokenStore({"HF_HOME": str(tmp_path), "HF_TOKEN": "hf_named"})
    assert named.locate(HUB) == ("environment", "hf_named")
    assert named.locate(MIRROR) is None


@pytest.mark.parametrize("token", ["", "two words", "x\r\nHost: y", "x" * 600, "é"])
def test_what_cannot_be_a_token(no_backend: None, token: str) -> None:
    with pytest.raises(ArgumentError, match="token"):
        TokenStore({}).keep(HUB, token)

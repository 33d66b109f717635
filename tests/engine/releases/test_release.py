"""What is said of a release is believed only if it is signed, sound, in its time and no older than before."""

from __future__ import annotations

import base64
import json
from datetime import date, timedelta
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.releases.errors import ReleaseError
from engine.releases.release import MAX_DOCUMENT_BYTES, is_newer, read_key, read_release
from engine.releases.source import shipped_source
from resources.release import sign as signing
from tests.support.signed_releases import KEY, PAGE, PUBLIC_KEY, release_values, signed_release

TODAY = date(2026, 11, 22)
DAY = timedelta(days=1)
PUBLIC = read_key(PUBLIC_KEY)


def fault_of(data: bytes, *, today: date = TODAY, seen_serial: int = 0, key: bytes = PUBLIC) -> str:
    with pytest.raises(ReleaseError) as caught:
        read_release(data, key, today=today, seen_serial=seen_serial)
    assert caught.value.summary().endswith(".")
    return caught.value.fault


def test_a_sound_document_is_read() -> None:
    release = read_release(signed_release(TODAY), PUBLIC, today=TODAY, seen_serial=7)
    assert (release.version, release.serial, release.page) == ("9.1.0", 7, PAGE)
    assert release.expires == TODAY + timedelta(days=30)


def test_keys_of_later_versions_are_read_over() -> None:
    assert read_release(signed_release(TODAY, mirrors=["x"]), PUBLIC, today=TODAY).version == "9.1.0"


@pytest.mark.parametrize(
    "change",
    [
        lambda text: text.replace("9.1.0", "9.2.0"),
        lambda text: text + " ",
        lambda text: text.replace("coffee", "c\u043effee"),
        lambda text: text.replace("coffee", "\ud800"),
    ],
)
def test_words_that_were_not_signed_are_not_believed(change: object) -> None:
    assert callable(change)
    envelope = json.loads(signed_release(TODAY))
    envelope["release"] = change(envelope["release"])
    assert fault_of(json.dumps(envelope).encode()) in ("signature", "form")


@pytest.mark.parametrize("signature", ["", "AAAA", "ä", "=", base64.b64encode(bytes(64)).decode()])
def test_no_other_signature_will_do(signature: str) -> None:
    envelope = json.loads(signed_release(TODAY)) | {"signature": signature}
    assert fault_of(json.dumps(envelope).encode()) == "signature"


def test_the_key_of_somebody_else_will_not_do() -> None:
    assert fault_of(signed_release(TODAY), key=bytes(32)) == "signature"
    assert fault_of(signed_release(TODAY), key=read_key(shipped_source().key)) == "signature"


def test_what_is_signed_for_another_purpose_is_not_taken_for_a_release() -> None:
    text = json.dumps(release_values(TODAY))
    envelope = {"release": text, "signature": base64.b64encode(KEY.sign(text.encode())).decode()}
    assert fault_of(json.dumps(envelope).encode()) == "signature"


def test_it_holds_until_its_last_day() -> None:
    data = signed_release(TODAY)
    assert read_release(data, PUBLIC, today=TODAY + 30 * DAY).serial == 7
    assert fault_of(data, today=TODAY + 31 * DAY) == "expired"
    assert read_release(data, PUBLIC, today=TODAY - DAY).serial == 7
    assert fault_of(data, today=TODAY - 2 * DAY) == "clock"


def test_an_older_document_is_not_shown_again() -> None:
    assert fault_of(signed_release(TODAY), seen_serial=8) == "older"


def test_what_is_too_long_is_not_read() -> None:
    assert fault_of(signed_release(TODAY, summary="x" * MAX_DOCUMENT_BYTES)) == "size"


@pytest.mark.parametrize(
    "changed",
    [
        {"version": "9.1.0-beta"},
        {"version": "9" * 50},
        {"version": "\u0669.1"},
        {"page": "http://192.0.2.1/"},
        {"page": "file:///etc/passwd"},
        {"page": "https://192.0.2.1/" + "x" * 500},
        {"serial": 0},
        {"serial": 1 << 60},
        {"serial": "7"},
        {"summary": "x" * 301},
        {"summary": None},
        {"expires": "2026-11-21"},
        {"expires": "soon"},
        {"published": 20261122},
        {"format": 2},
        {"format": None},
    ],
)
def test_values_that_no_release_has_are_refused_though_signed(changed: dict[str, object]) -> None:
    assert fault_of(signed_release(TODAY, **changed)) == "form"


@given(st.binary(max_size=400) | st.from_regex(rb'\{"release": ".*", "signature": ".*"\}', fullmatch=True))
def test_any_bytes_end_in_one_sentence(data: bytes) -> None:
    assert fault_of(data) in ("form", "signature")


def test_deep_nesting_ends_in_one_sentence() -> None:
    assert fault_of(b"[" * 10_000) == "form"


@pytest.mark.parametrize(
    ("version", "installed", "newer"),
    [
        ("0.2.0", "0.1.0", True),
        ("0.10", "0.9.9", True),
        ("0.1.0", "0.1.0", False),
        ("0.1", "0.1.0", False),
        ("0.0.9", "0.1.0", False),
        ("1.0.0", "0.1.0.dev1", False),
        ("1.0.0", "not installed", False),
    ],
)
def test_only_a_later_version_is_news(version: str, installed: str, newer: bool) -> None:
    assert is_newer(version, installed) is newer


def test_what_publishers_sign_is_what_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(signing.PASSPHRASE, "three little words")
    private, source, out, second = (tmp_path / name for name in ("key.pem", "releases.json", "a.json", "b.json"))
    source.write_text('{"address": "https://192.0.2.1/r.json", "key": ""}')
    assert signing.main(["new-key", str(private), "--source", str(source)]) == 0
    assert private.stat().st_mode & 0o077 == 0
    assert b"ENCRYPTED" in private.read_bytes()
    words = ["--version", "0.2.0", "--page", PAGE]
    assert signing.main(["sign", str(private), str(out), *words, "--days", "3"]) == 0
    assert signing.main(["sign", str(private), str(second), *words, "--previous", str(out)]) == 0
    known = json.loads(source.read_text())
    assert known["address"] == "https://192.0.2.1/r.json"
    published = date.fromisoformat(json.loads(json.loads(out.read_text())["release"])["published"])
    first = read_release(out.read_bytes(), read_key(known["key"]), today=published)
    assert (first.serial, first.expires - first.published) == (1, 3 * DAY)
    assert read_release(second.read_bytes(), read_key(known["key"]), today=published).serial == 2
    with pytest.raises(FileExistsError):
        signing.main(["new-key", str(private), "--source", str(source)])

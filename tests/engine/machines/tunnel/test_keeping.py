"""Stored data of a machine: its own key, its pairings, and the valid pairing code."""

from __future__ import annotations

import errno
import hashlib
import hmac
import os
import stat
import threading
from pathlib import Path

import pytest

from engine.base.errors import DocumentError
from engine.machines.tunnel.identity import IdentityError, read_identity, shown_fingerprint
from engine.machines.tunnel.pairing import ALPHABET, LIFETIME_S, MAX_GUESSES, OpenCode, _proof, make_code, read_code
from engine.machines.tunnel.pairings import MAX_NAME, Pairing, PairingError, PairingStore, make_pairing

CODE = "K7QM-3XHD-9RWP-T2FV"


def paired(folder: Path, name: str, role: str = "server") -> Pairing:
    certificate = read_identity(folder / f"{name}.pem").certificate
    return make_pairing("server" if role == "server" else "client", name, certificate, f"192.0.2.1:{len(name) + 1000}")


@pytest.mark.skipif(os.name == "nt", reason="Windows has no permission bits")
def test_a_key_is_made_once_and_nobody_else_can_read_it(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "identity.pem"
    first = read_identity(path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert [each.name for each in path.parent.iterdir()] == ["identity.pem"]
    path.chmod(0o644)
    assert read_identity(path) == first
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert read_identity(tmp_path / "other.pem").fingerprint != first.fingerprint


def test_a_damaged_key_is_told_and_left_as_it_is(tmp_path: Path) -> None:
    path = tmp_path / "identity.pem"
    path.write_bytes(b"no key")
    with pytest.raises(IdentityError, match="is damaged; remove the file"):
        read_identity(path)
    assert path.read_bytes() == b"no key"


def test_pairings_are_found_by_name_endpoint_and_fingerprint(tmp_path: Path) -> None:
    book = PairingStore(tmp_path / "deep" / "pairings.json")
    assert book.all() == ()
    attic, cellar = paired(tmp_path, "attic"), paired(tmp_path, "cellar")
    for each in (attic, cellar):
        book.add(each)
    assert book.all("server") == (attic, cellar)
    assert book.all("client") == ()
    for text in (
        "attic",
        attic.endpoint,
        attic.fingerprint,
        attic.fingerprint[:12],
        shown_fingerprint(attic.fingerprint),
    ):
        assert book.server(text) == attic
    with pytest.raises(PairingError, match='No computer is paired under "garden"'):
        book.server("garden")


def test_pairing_again_takes_the_place_of_the_earlier_pairing(tmp_path: Path) -> None:
    book = PairingStore(tmp_path / "pairings.json")
    attic = paired(tmp_path, "attic")
    book.add(attic)
    moved = make_pairing("server", "attic", attic.der, "192.0.2.9:5000")
    book.add(moved)
    book.add(paired(tmp_path, "attic", "client"))
    assert [each.endpoint for each in book.all("server")] == ["192.0.2.9:5000"]
    assert len(book.forget("attic")) == 2
    assert book.all() == ()


def test_nobody_loses_what_another_keeps_at_the_same_time(tmp_path: Path) -> None:
    names = [f"machine-{number}" for number in range(8)]
    pairings = [paired(tmp_path, name) for name in names]
    threads = [
        threading.Thread(target=PairingStore(tmp_path / "pairings.json").add, args=(pairing,)) for pairing in pairings
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(each.name for each in PairingStore(tmp_path / "pairings.json").all()) == names


def test_two_machines_of_one_name_are_told_apart(tmp_path: Path) -> None:
    book = PairingStore(tmp_path / "pairings.json")
    for number in range(2):
        certificate = read_identity(tmp_path / f"{number}.pem").certificate
        book.add(make_pairing("server", "attic", certificate))
    with pytest.raises(PairingError, match="more than one computer: attic"):
        book.forget("attic")
    assert len(book.all()) == 2


@pytest.mark.parametrize("data", [b"", b"{", b"[]", b'{"version": 9}', b'{"version":1,"pairings":[{"role":"client"}]}'])
def test_a_list_that_cannot_be_read_pairs_nobody(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "pairings.json"
    path.write_bytes(data)
    assert PairingStore(path).all() == ()


@pytest.mark.parametrize("data", [b"", b"{", b'{"version":1,"pairings":[{"role":"client"}]}'])
def test_a_damaged_list_is_kept_when_the_next_machine_is_paired(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "pairings.json"
    path.write_bytes(data)
    book, attic = PairingStore(path), paired(tmp_path, "attic")
    book.add(attic)
    assert book.all() == (attic,)
    assert (tmp_path / "pairings.damaged").read_bytes() == data


def test_a_list_of_another_version_stays_as_it_is(tmp_path: Path) -> None:
    path = tmp_path / "pairings.json"
    path.write_bytes(b'{"version":2}')
    book, attic = PairingStore(path), paired(tmp_path, "attic")
    for change in (lambda: book.add(attic), lambda: book.forget("attic")):
        with pytest.raises(DocumentError, match="is of another version of Layerdeck"):
            change()
    assert path.read_bytes() == b'{"version":2}'
    assert book.forgotten("server", [attic.fingerprint]) == frozenset()


def test_a_list_that_cannot_be_read_for_a_moment_loses_nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    book = PairingStore(tmp_path / "pairings.json")
    attic, cellar = paired(tmp_path, "attic"), paired(tmp_path, "cellar")
    book.add(attic)

    def without_descriptors(*_: object, **__: object) -> bytes:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    with monkeypatch.context() as patch:
        patch.setattr("engine.base.json_file.read_at_most", without_descriptors)
        with pytest.raises(DocumentError, match="cannot be read"):
            book.add(cellar)
        assert book.forgotten("server", [attic.fingerprint]) == frozenset()
    assert book.all() == (attic,)
    assert book.forgotten("server", [attic.fingerprint, cellar.fingerprint]) == {cellar.fingerprint}
    assert book.forgotten("client", [attic.fingerprint]) == {attic.fingerprint}


def test_an_empty_name_names_no_client(tmp_path: Path) -> None:
    book = PairingStore(tmp_path / "pairings.json")
    book.add(make_pairing("client", "laptop", paired(tmp_path, "laptop").der))
    with pytest.raises(PairingError, match="No computer is paired under"):
        book.forget("")
    assert len(book.all()) == 1


def test_a_pairing_without_a_certificate_is_none(tmp_path: Path) -> None:
    path = tmp_path / "pairings.json"
    path.write_text('{"pairings":[{"role":"client","name":"a","certificate":"no base64"}]}', encoding="utf-8")
    assert PairingStore(path).all() == ()


def test_the_name_that_the_other_side_chose_steers_nothing() -> None:
    pairing = make_pairing("client", "\x1b[2J\u202eattic\n" + "x" * 500, b"certificate")
    assert len(pairing.name) <= MAX_NAME
    assert pairing.name.isprintable()
    assert make_pairing("client", " \n ", b"certificate").name == "unnamed"


def test_a_code_is_read_however_it_is_typed() -> None:
    code = make_code()
    letters = code.replace("-", "")
    assert [len(group) for group in code.split("-")] == [4, 4, 4, 4]
    assert set(letters) <= set(ALPHABET)
    assert read_code(code) == read_code(f" {letters.lower()} ") == read_code(" ".join(letters)) == letters.encode()
    assert make_code() != code


@pytest.mark.parametrize("text", ["", "K7QM-3XHD", f"{CODE[:-1]}0", f"{CODE}D", CODE.replace("-", "_")])
def test_what_is_no_code_is_told(text: str) -> None:
    with pytest.raises(ValueError, match="A pairing code has 16 letters and digits"):
        read_code(text)


def test_a_code_is_for_one_use() -> None:
    opened = OpenCode()
    assert opened.current is None
    code = opened.renew()
    assert opened.current == code
    assert opened.take(code, right=True)
    assert opened.current is None
    assert not opened.take(code, right=True)


def test_a_code_is_for_few_guesses() -> None:
    opened = OpenCode()
    code = opened.renew()
    for _ in range(MAX_GUESSES):
        assert opened.current == code
        assert not opened.take(code, right=False)
    assert opened.current is None
    assert not opened.take(code, right=True)


def test_a_code_is_for_a_time_and_a_new_one_ends_it() -> None:
    now_s = 0.0
    opened = OpenCode(lambda: now_s)
    code = opened.renew()
    now_s = LIFETIME_S - 1
    assert (opened.current, opened.left_s) == (code, 1)
    other = opened.renew()
    assert not opened.take(code, right=True)
    now_s += LIFETIME_S
    assert (opened.current, opened.left_s) == (None, 0)
    assert not opened.take(other, right=True)


def test_a_proof_is_about_the_code_both_nonces_both_certificates_and_its_side() -> None:
    parts = [b"client", b"CODE", b"c" * 16, b"s" * 16, b"client certificate", b"server certificate"]
    fingerprints = hashlib.sha256(parts[4]).hexdigest() + hashlib.sha256(parts[5]).hexdigest()
    expected = hmac.new(b"CODE", b"client" + b"c" * 16 + b"s" * 16 + fingerprints.encode(), "sha256").digest()
    assert _proof(*parts) == expected
    changed = [[*parts[:at], parts[at][:-1] + b"?", *parts[at + 1 :]] for at in range(len(parts))]
    assert len({expected, *(_proof(*each) for each in changed)}) == 1 + len(parts)

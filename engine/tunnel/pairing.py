"""Pairing over a TLS connection on which nobody is known yet: both sides prove to know the code, and keep certificates.

What each side proves covers the certificates as it sees them: the server's as TLS showed it, the client's as it was
sent. Somebody in the middle shows others, and has one guess at the code for each whole exchange.
"""

from __future__ import annotations

import hmac
import secrets
import time

import msgspec

from engine.tunnel.channel import BrokenTalkError, Channel
from engine.tunnel.codes import OpenCode, read_code
from engine.tunnel.cpace import CpaceError, calculate_generator, confirmation, multiply, session_key
from engine.tunnel.fingerprints import fingerprint_of
from engine.tunnel.identity import Identity, is_certificate
from engine.tunnel.pairings import Pairing, PairingError, make_pairing

_CHANNEL = b"layerdeck pairing 1"
_NONCE_BYTES = 16
_CLIENT, _SERVER = b"client", b"server"
NO_CODE = "shows no pairing code; let it show one, then try again"
WRONG_CODE = "did not accept the code; check it, and let it show a new one after three wrong ones or ten minutes"
_ENDED = "does not know the code, or ended the exchange; nothing was paired"


class Welcome(msgspec.Struct, frozen=True):
    """The server's first word. `refusal`: why there is no exchange now."""

    nonce: bytes
    refusal: str = ""


class Offer(msgspec.Struct, frozen=True):
    """The client's certificate, the name under which it wants to be listed, and its share."""

    nonce: bytes
    certificate: bytes
    name: str
    share: bytes


class Answer(msgspec.Struct, frozen=True):
    name: str
    share: bytes


class Proof(msgspec.Struct, frozen=True):
    """That a side has the key. Empty from the server: the client has not shown that it has."""

    tag: bytes


def answer_pairing(channel: Channel, identity: Identity, name: str, code: OpenCode) -> Pairing | None:
    """Be the server of one exchange; return the pairing that it may be kept as, None where there is none.

    Raises:
        BrokenTalkError, OSError: as a `Channel`.
    """
    shown, nonce = code.current, secrets.token_bytes(_NONCE_BYTES)
    channel.send_message(Welcome(nonce, "" if shown else NO_CODE))
    if shown is None:
        return None
    offer = channel.receive_message(Offer)
    if len(offer.nonce) != _NONCE_BYTES or not is_certificate(offer.certificate):
        raise BrokenTalkError("it offered what cannot be")
    session = offer.nonce + nonce
    generator, scalar = calculate_generator(read_code(shown), _CHANNEL, session), secrets.token_bytes(32)
    share = multiply(scalar, generator)
    channel.send_message(Answer(name, share))
    key = _key(session, _shared(scalar, offer.share), offer.share, share, offer.certificate, identity.certificate)
    is_right = hmac.compare_digest(channel.receive_message(Proof).tag, confirmation(key, _CLIENT))
    if not code.take(shown, right=is_right):
        channel.send_message(Proof(b""))
        return None
    channel.send_message(Proof(confirmation(key, _SERVER)))
    return make_pairing("client", offer.name, offer.certificate, paired_s=int(time.time()))


def ask_pairing(
    channel: Channel, certificate: bytes, identity: Identity, name: str, code: str, endpoint: str
) -> Pairing:
    """Be the client of one exchange with the machine that showed `certificate`; return what is to be kept of it.

    Raises:
        PairingError: with the words that follow the name of the machine.
        BrokenTalkError, OSError: as a `Channel`.
    """
    welcome = channel.receive_message(Welcome)
    if welcome.refusal or len(welcome.nonce) != _NONCE_BYTES:
        raise PairingError(NO_CODE)
    nonce, scalar = secrets.token_bytes(_NONCE_BYTES), secrets.token_bytes(32)
    session = nonce + welcome.nonce
    share = multiply(scalar, calculate_generator(read_code(code), _CHANNEL, session))
    channel.send_message(Offer(nonce, identity.certificate, name, share))
    answer = channel.receive_message(Answer)
    key = _key(session, _shared(scalar, answer.share), share, answer.share, identity.certificate, certificate)
    channel.send_message(Proof(confirmation(key, _CLIENT)))
    tag = channel.receive_message(Proof).tag
    if not tag:
        raise PairingError(WRONG_CODE)
    if not hmac.compare_digest(tag, confirmation(key, _SERVER)):
        raise PairingError(_ENDED)
    return make_pairing("server", answer.name, certificate, endpoint, int(time.time()))


def _shared(scalar: bytes, share: bytes) -> bytes:
    try:
        return multiply(scalar, share)
    except CpaceError:
        raise BrokenTalkError("it sent no point of the curve") from None


def _key(
    session: bytes, shared: bytes, client_share: bytes, server_share: bytes, client: bytes, server: bytes
) -> bytes:
    """Return the key of the exchange; what each side has seen of both certificates is part of it."""
    of_client = (client_share, fingerprint_of(client).encode())
    of_server = (server_share, fingerprint_of(server).encode())
    return session_key(session, shared, of_client, of_server)

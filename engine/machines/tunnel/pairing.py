"""Pairing: two machines prove to each other that both know a code, and then store each other's certificate.

The serving machine shows a code of 16 letters and digits, and a person types it at the client. The TLS connection
between them is not authenticated yet. Each side sends a random nonce and its certificate, and proves that it knows the
code with an HMAC whose key is the code. The HMAC covers both nonces and both certificates: each side takes its own
certificate, and the one that it received from the other side. The client receives the server's certificate in the TLS
handshake, the server receives the client's in a message. A man in the middle shows certificates of his own, so the two
sides compute different HMACs, and nothing is paired.

A man in the middle gets the client's proof and may try codes against it offline. This is why the code is long: 31**16
codes are 79 bits. At 10**12 HMACs per second, half of the codes take some 11,500 years. And a code expires after
ten minutes, three wrong tries or one use. A code of 8 letters (40 bits) would be found within a second; so short a code
needs a password-authenticated key exchange, which the standard library does not have.
"""

from __future__ import annotations

import hmac
import secrets
import threading
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress

from msgspec import Struct

from engine.base.errors import DocumentError
from engine.machines.tunnel.identity import Identity, fingerprint_of, is_certificate
from engine.machines.tunnel.pairings import Pairing, PairingError, make_pairing
from engine.machines.tunnel.streams import BrokenTalkError, Stream

ALPHABET = "23456789ABCDEFGHJKMNPQRSTUVWXYZ"
"""Letters and digits of a pairing code. Those that look alike are left out: 0 and O, 1, I and L."""
LENGTH = 16
GROUP_LENGTH = 4
LIFETIME_S = 600.0
MAX_GUESSES = 3
NO_CODE = "shows no pairing code; let it show one, then try again"
WRONG_CODE = "did not accept the code; check it, and let it show a new one after three wrong ones or ten minutes"
NOT_KEPT = "could not store the pairing, and shows why; mend that, then let it show a new code"
_ENDED = "does not know the code, or ended the exchange; nothing was paired"
GUESSED_OUT = f"The pairing code is not valid any more: wrong codes were sent {MAX_GUESSES} times. Show a new one."
_NONCE_BYTES = 16
_DIGEST = "sha256"
_CLIENT, _SERVER = b"layerdeck pairing 2 client", b"layerdeck pairing 2 server"
"""First bytes of the text from which a proof is computed.

Client and server use different bytes, so a proof of one side cannot be sent back as the proof of the other side.
"""


def make_code() -> str:
    """Return a new random pairing code of 79 bits, in the form `K7QM-3XHD-9RWP-T2FV`."""
    letters = "".join(secrets.choice(ALPHABET) for _ in range(LENGTH))
    return "-".join(letters[at : at + GROUP_LENGTH] for at in range(0, LENGTH, GROUP_LENGTH))


def read_code(text: str) -> bytes:
    """Return the HMAC key for a code as people type it: lower case, spaces and missing hyphens are accepted.

    Raises:
        ValueError: with a sentence, if `text` cannot be a code.
    """
    letters = "".join(text.upper().replace("-", " ").split())
    if len(letters) != LENGTH or not set(letters) <= set(ALPHABET):
        raise ValueError(
            f"A pairing code has {LENGTH} letters and digits, such as K7QM-3XHD-9RWP-T2FV; the other computer shows it."
        )
    return letters.encode()


class OpenCode:
    """The pairing code that this machine shows now, if any, and the number of wrong attempts to use it. Thread-safe.

    `clock`: returns seconds; for tests.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._code: str | None = None
        self._until_s = 0.0
        self._guesses_left = 0

    def renew(self) -> str:
        """Make a new code that replaces the current one, and return it."""
        with self._lock:
            self._code, self._guesses_left = make_code(), MAX_GUESSES
            self._until_s = self._clock() + LIFETIME_S
            return self._code

    @property
    def current(self) -> str | None:
        """The code that is valid now; None if there is none: it expired, was used, or was guessed wrong too often."""
        with self._lock:
            return self._code if self._is_open() else None

    @property
    def left_s(self) -> float:
        """Seconds until the code that is valid now expires; 0 if there is none."""
        with self._lock:
            return max(0.0, self._until_s - self._clock()) if self._is_open() else 0.0

    def has_too_many_wrong_tries(self, code: str) -> bool:
        """Return whether `code` is the current code, but no longer valid because of too many wrong guesses."""
        with self._lock:
            return code == self._code and self._guesses_left <= 0

    def take(self, code: str, *, right: bool) -> bool:
        """Count one attempt with `code`, and return whether it succeeds. A successful attempt makes the code invalid.

        `right`: whether the proof of the attempt was right.
        """
        with self._lock:
            # The code may have been renewed or used since the attempt began; the attempt then counts against no code.
            if not self._is_open() or code != self._code:
                return False
            self._guesses_left -= 1
            if right:
                self._code = None
            return right

    def _is_open(self) -> bool:
        return self._code is not None and self._guesses_left > 0 and self._clock() < self._until_s


class Welcome(Struct, frozen=True):
    """The server's first message of a pairing.

    `nonce`: random bytes of the server, which the proofs cover.
    `name`: name of the server.
    `refusal`: why the server does not pair now, empty if it does.
    """

    nonce: bytes
    name: str
    refusal: str = ""


class Offer(Struct, frozen=True):
    """The client's message of a pairing.

    `nonce`: random bytes of the client, which the proofs cover.
    `certificate`: certificate of the client (DER).
    `name`: name under which the server lists the client.
    `proof`: HMAC that proves that the client knows the code.
    """

    nonce: bytes
    certificate: bytes
    name: str
    proof: bytes


class Verdict(Struct, frozen=True):
    """The server's last message of a pairing.

    `proof`: HMAC that proves that the server knows the code; empty if nothing was paired.
    `refusal`: why nothing was paired although the client's proof was right; else empty. Older releases leave it empty.
    """

    proof: bytes
    refusal: str = ""


async def accept_pairing(
    stream: Stream, identity: Identity, name: str, code: OpenCode, keep: Callable[[Pairing], Awaitable[None]]
) -> Pairing | None:
    """Run the server's side of one attempt to pair; return the pairing, or None if the client did not know the code.

    `name`: name of this machine, which the client stores.
    `code`: the pairing code that this machine shows.
    `keep`: stores the pairing. It is called before the client gets the result, because the client may connect at once.

    Raises:
        BrokenTalkError: if the client violates the protocol.
        OSError: if the connection breaks.
        PairingError: with a sentence for the lender, if this was the last wrong attempt that the code allows.
        DocumentError: if `keep` cannot write the file of pairings.
    """
    shown, nonce = code.current, secrets.token_bytes(_NONCE_BYTES)
    await stream.send_message(Welcome(nonce, name, "" if shown else NO_CODE))
    if shown is None:
        return None
    offer = await stream.receive_message(Offer)
    if len(offer.nonce) != _NONCE_BYTES or not is_certificate(offer.certificate):
        raise BrokenTalkError("it offered an invalid nonce or certificate")
    shared = (read_code(shown), offer.nonce, nonce, offer.certificate, identity.certificate)
    # The client proves first: whoever calls without the code gets nothing to try codes against.
    is_right = hmac.compare_digest(offer.proof, _proof(_CLIENT, *shared))
    # The lock in `take` decides between attempts at the same time: one code pairs one machine.
    if not code.take(shown, right=is_right):
        await stream.send_message(Verdict(b""))
        if code.has_too_many_wrong_tries(shown):
            raise PairingError(GUESSED_OUT)
        return None
    pairing = make_pairing("client", offer.name, offer.certificate, paired_s=int(time.time()))
    try:
        await keep(pairing)
    except DocumentError:
        with suppress(OSError):  # The client may have gone. The lender is told in any case.
            await stream.send_message(Verdict(b"", NOT_KEPT))
        raise
    await stream.send_message(Verdict(_proof(_SERVER, *shared)))
    return pairing


async def ask_pairing(stream: Stream, identity: Identity, name: str, code: str, endpoint: str) -> Pairing:
    """Run the client's side of one attempt to pair; return the pairing, which the caller stores.

    `name`: name under which the server lists this machine.
    `code`: pairing code that the user typed.
    `endpoint`: address of the server (host:port), stored in the pairing.

    Raises:
        PairingError: if the attempt failed. Its text is a predicate without subject, such as "refused the code".
        BrokenTalkError: if the server violates the protocol.
        OSError: if the connection breaks.
    """
    welcome = await stream.receive_message(Welcome)
    if welcome.refusal or len(welcome.nonce) != _NONCE_BYTES:
        raise PairingError(NO_CODE)
    nonce, certificate = secrets.token_bytes(_NONCE_BYTES), stream.certificate
    shared = (read_code(code), nonce, welcome.nonce, identity.certificate, certificate)
    await stream.send_message(Offer(nonce, identity.certificate, name, _proof(_CLIENT, *shared)))
    verdict = await stream.receive_message(Verdict)
    if not verdict.proof:
        raise PairingError(NOT_KEPT if verdict.refusal else WRONG_CODE)
    if not hmac.compare_digest(verdict.proof, _proof(_SERVER, *shared)):
        raise PairingError(_ENDED)
    return make_pairing("server", welcome.name, certificate, endpoint, int(time.time()))


def _proof(side: bytes, code: bytes, client_nonce: bytes, server_nonce: bytes, client: bytes, server: bytes) -> bytes:
    """Return the HMAC by which one side proves that it knows the code.

    The message starts with `side`. All other parts have a fixed length, so different parts never give the same message.
    `side`: first bytes for this side (`_CLIENT` or `_SERVER`).
    `code`: HMAC key.
    `client_nonce`, `server_nonce`: random bytes of both sides.
    `client`, `server`: certificates of both sides (DER).
    """
    fingerprints = (fingerprint_of(client) + fingerprint_of(server)).encode()
    return hmac.digest(code, side + client_nonce + server_nonce + fingerprints, _DIGEST)

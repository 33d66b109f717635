"""The short code that a machine shows while it may be paired with: for a time, for few guesses, for one use."""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Callable

ALPHABET = "23456789ABCDEFGHJKMNPQRSTUVWXYZ"
"""Without what looks alike: 0 and O, 1, I and L."""
LENGTH = 8
LIFETIME_S = 600.0
MAX_GUESSES = 3


def make_code() -> str:
    """Return a code of almost 40 bits as it is shown: `K7QM-3XHD`."""
    letters = "".join(secrets.choice(ALPHABET) for _ in range(LENGTH))
    return f"{letters[: LENGTH // 2]}-{letters[LENGTH // 2 :]}"


def read_code(text: str) -> bytes:
    """Return what both sides compute with, however people write a code.

    Raises:
        ValueError: with a sentence, for what cannot be one.
    """
    letters = "".join(text.upper().replace("-", " ").split())
    if len(letters) != LENGTH or not set(letters) <= set(ALPHABET):
        raise ValueError(
            f"A pairing code has {LENGTH} letters and digits, such as K7QM-3XHD; the other computer shows it."
        )
    return letters.encode()


class OpenCode:
    """The code that counts now, if one does. Any thread."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._code: str | None = None
        self._until_s = 0.0
        self._guesses_left = 0

    def renew(self) -> str:
        """Begin a new code, and return it as it is shown."""
        with self._lock:
            self._code, self._guesses_left = make_code(), MAX_GUESSES
            self._until_s = self._clock() + LIFETIME_S
            return self._code

    @property
    def current(self) -> str | None:
        """The code, None where there is none, its time is over, or it was used or guessed at too often."""
        with self._lock:
            return self._code if self._is_open() else None

    def take(self, code: str, *, right: bool) -> bool:
        """Count one whole exchange with `code`; return whether it pairs. A right one is used up."""
        with self._lock:
            if not self._is_open() or code != self._code:
                return False
            self._guesses_left -= 1
            if right:
                self._code = None
            return right

    def _is_open(self) -> bool:
        return self._code is not None and self._guesses_left > 0 and self._clock() < self._until_s

"""Ports for servers that a test starts with a number of its own."""

from __future__ import annotations

import itertools
import os
import socket

FIRST, COUNT = 10_000, 20_000
"""Below the ports that systems give to sockets without a number (Linux: from 32768, others: from 49152)."""

_numbers = itertools.count(os.getpid() * 97)  # Processes of one run begin far from each other.


def free_port() -> int:
    """Return a TCP port of 127.0.0.1 that is free, and that no socket without a number gets before it is used."""
    while True:
        port = FIRST + next(_numbers) % COUNT
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
        return port

"""A door for one: the worker's port takes connections from one other port of this machine, and from nobody else.

The engine's server takes anybody who connects. Linux lets a listening socket drop what a small program refuses, and
who holds a port lets nobody of another user bind it: so the tunnel before the worker, and only it, gets in.
"""

from __future__ import annotations

import ctypes
import os
import socket
import struct
import sys
from contextlib import suppress
from pathlib import Path

_SO_ATTACH_FILTER = 26
_LOAD_HALF, _JUMP_EQUAL, _RETURN = 0x28, 0x15, 0x06
"""From linux/filter.h. What a TCP socket's filter sees begins with the TCP header, and that with the source port."""
_INSTRUCTION = struct.Struct("HBBI")
_ALL = 0xFFFFFFFF


def admit_only(listening: int, client_port: int) -> bool:
    """Have the listening socket with descriptor `listening` drop what comes from other ports than `client_port`.

    Return whether this system does that. What was connected before stays.
    """
    if not sys.platform.startswith("linux"):
        return False
    program = ((_LOAD_HALF, 0, 0, 0), (_JUMP_EQUAL, 0, 1, client_port), (_RETURN, 0, 0, _ALL), (_RETURN, 0, 0, 0))
    code = ctypes.create_string_buffer(b"".join(_INSTRUCTION.pack(*each) for each in program))
    with socket.socket(fileno=os.dup(listening)) as door:
        try:
            door.setsockopt(
                socket.SOL_SOCKET, _SO_ATTACH_FILTER, struct.pack("HP", len(program), ctypes.addressof(code))
            )
        except OSError:
            return False
    return True


def own_sockets() -> dict[str, int]:
    """Return the descriptors of this process's sockets by inode."""
    found = {}
    for entry in Path("/proc/self/fd").iterdir():
        with suppress(OSError):  # closed by now
            link = str(entry.readlink())
            if link.startswith("socket:["):
                found[link.removeprefix("socket:[").removesuffix("]")] = int(entry.name)
    return found

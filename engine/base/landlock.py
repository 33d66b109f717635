"""Restricts this process with Landlock (Linux): its access to files, TCP ports, signals and abstract Unix sockets.

Linux has Landlock since version 5.13. The constants are those of `linux/landlock.h` and `linux/prctl.h`, since the
standard library has no binding for them. `engine.base.seccomp` refuses system calls that Landlock cannot refuse.
"""

from __future__ import annotations

import ctypes
import os
import stat
import sys
from collections.abc import Iterable
from pathlib import Path

from msgspec import Struct

# Numbers of system calls from 424 on are the same on all architectures but Alpha.
_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446
_VERSION_FLAG = 1
_RULE_PATH_BENEATH, _RULE_NET_PORT = 1, 2
_ALL_THREADS = 1 << 3
_PR_SET_NO_NEW_PRIVS = 38
_O_PATH = 0o10000000

_EXECUTE, _WRITE_FILE, _READ_FILE, _READ_DIR = 1 << 0, 1 << 1, 1 << 2, 1 << 3
_TRUNCATE = 1 << 14
_FIRST_RIGHTS = (1 << 13) - 1
_RIGHTS_SINCE = {2: 1 << 13, 3: _TRUNCATE}
"""File rights that later Landlock versions added, by version. A kernel refuses rights that its version does not know.

The right for device ioctls (version 5) is left out, because drivers need ioctls; rights left out stay allowed.
"""
_READING = _READ_FILE | _READ_DIR
_OF_FILES = _EXECUTE | _WRITE_FILE | _READ_FILE | _TRUNCATE
"""The rights that a rule for a single file may contain; all other rights apply to folders only."""
_BIND_TCP, _CONNECT_TCP = 1 << 0, 1 << 1
_ABSTRACT_SOCKETS, _SIGNALS = 1 << 0, 1 << 1

TRUNCATING_SINCE, NETWORK_SINCE, SCOPES_SINCE, THREADS_SINCE = 3, 4, 6, 8
"""Landlock versions that introduced limits for the truncation of files, for TCP ports, for signals and abstract Unix
sockets, and for threads that already exist.
"""


class _RulesetAttributes(ctypes.Structure):
    _fields_ = (
        ("handled_access_fs", ctypes.c_uint64),
        ("handled_access_net", ctypes.c_uint64),
        ("scoped", ctypes.c_uint64),
    )


class _NetPort(ctypes.Structure):
    _fields_ = (("allowed_access", ctypes.c_uint64), ("port", ctypes.c_uint64))


class _PathBeneath(ctypes.Structure):
    # `struct landlock_path_beneath_attr` is packed.
    _pack_ = 1
    _fields_ = (("allowed_access", ctypes.c_uint64), ("parent_fd", ctypes.c_int32))


class Reach(Struct, frozen=True):
    """The access that Landlock leaves to a process. A folder includes everything below it.

    `readable`, `writable`: files and folders.
    `programs`: files that may be executed.
    `connect`, `listen`: TCP ports to connect to and to listen on; None: all ports.
    """

    readable: tuple[Path, ...] = ()
    writable: tuple[Path, ...] = ()
    programs: tuple[Path, ...] = ()
    connect: tuple[int, ...] | None = ()
    listen: tuple[int, ...] | None = ()


def landlock_version() -> int:
    """Return the Landlock version (ABI) of this kernel; 0 if it has no Landlock."""
    if not sys.platform.startswith("linux"):
        return 0
    # With this flag the call returns the version instead of a ruleset, and -1 if the kernel lacks Landlock.
    return max(0, int(_system_call()(_CREATE_RULESET, None, 0, _VERSION_FLAG)))


def drop_privileges() -> bool:
    """Prevent this thread, and the threads that it starts, from gaining privileges, for example by a set-uid program.

    Return whether the call succeeds. An unprivileged process must make this call (PR_SET_NO_NEW_PRIVS) before it uses
    Landlock or seccomp on itself.
    """
    return bool(ctypes.CDLL(None).prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0)


def restrict(reach: Reach) -> bool:
    """Restrict the calling thread, and the threads that it starts, to `reach`; return whether the system can do that.

    Call `drop_privileges` first. From Landlock version 8 on, all threads of the process are restricted. Files that are
    already open can still be used.
    """
    version = landlock_version()
    if not version:
        return False
    handled = _FIRST_RIGHTS
    # A kernel rejects a ruleset with rights that it does not know.
    for since, rights in _RIGHTS_SINCE.items():
        handled |= rights if version >= since else 0
    call = _system_call()
    attributes = _RulesetAttributes(handled)
    if version >= NETWORK_SINCE:
        attributes.handled_access_net = _CONNECT_TCP * (reach.connect is not None) | _BIND_TCP * (
            reach.listen is not None
        )
    if version >= SCOPES_SINCE:
        attributes.scoped = _ABSTRACT_SOCKETS | _SIGNALS
    ruleset = int(call(_CREATE_RULESET, ctypes.byref(attributes), ctypes.sizeof(attributes), 0))
    if ruleset < 0:
        return False
    try:
        _allow_files(ruleset, reach.readable, _READING)
        # No right to execute in writable folders: the process could start a program that it has written.
        _allow_files(ruleset, reach.writable, handled & ~_EXECUTE)
        _allow_files(ruleset, reach.programs, _EXECUTE | _READ_FILE)
        if attributes.handled_access_net:
            for rights, numbers in ((_CONNECT_TCP, reach.connect), (_BIND_TCP, reach.listen)):
                for port in numbers or ():
                    call(_ADD_RULE, ruleset, _RULE_NET_PORT, ctypes.byref(_NetPort(rights, port)), 0)
        flags = _ALL_THREADS if version >= THREADS_SINCE else 0
        return int(call(_RESTRICT_SELF, ruleset, flags)) == 0
    finally:
        os.close(ruleset)


def _allow_files(ruleset: int, paths: Iterable[Path], rights: int) -> None:
    """Add a rule with these rights for each existing path to a Landlock ruleset. `ruleset`: its file descriptor."""
    for path in paths:
        try:
            descriptor = os.open(path, _O_PATH | os.O_CLOEXEC)
        except (OSError, ValueError):
            continue
        try:
            # The kernel rejects a rule for a file with rights that concern folders, such as making files.
            is_folder = stat.S_ISDIR(os.fstat(descriptor).st_mode)
            rule = _PathBeneath(rights if is_folder else rights & _OF_FILES, descriptor)
            _system_call()(_ADD_RULE, ruleset, _RULE_PATH_BENEATH, ctypes.byref(rule), 0)
        finally:
            os.close(descriptor)


def _system_call() -> ctypes._NamedFuncPointer:
    call = ctypes.CDLL(None).syscall
    # The default of ctypes is int, which would cut the result of `syscall` on 64 bits.
    call.restype = ctypes.c_long
    return call

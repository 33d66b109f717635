"""Installs a seccomp filter, which makes Linux refuse certain system calls of this process, in all of its threads.

The filter refuses calls that Landlock cannot refuse: UDP, Unix sockets with a path, protocols other than TCP, listening
without `bind`, starting programs on a kernel without Landlock, signals to the parent before Landlock's version 6, and
scheduling of other processes. For one call, which binds a thread to processors, the kernel can ask the parent whether
to allow it (`engine.base.thread_binding`). The filter also applies to threads that exist already, such as those of
drivers; Landlock does so from version 8 on.

The filter is a program of some 160 instructions (classic BPF, `linux/filter.h`). libseccomp could generate it, but its
binding (pyseccomp) needs a system library that not every desktop has, and would delay the start of a child. The numbers
of system calls are those of `asm/unistd_64.h` (x86_64) and `asm-generic/unistd.h` (aarch64). On other machines nothing
is refused. Most calls cost no time: the kernel precomputes which numbers a filter always allows.
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import socket
import struct
import sys
from collections.abc import Callable, Iterable
from contextlib import suppress
from enum import Enum
from functools import cache
from typing import NamedTuple

from msgspec import Struct

from engine.base.values import replace


class Binding(Enum):
    """Treatment of system calls that bind a thread, given by its id, to processors.

    REFUSED: the call fails. ASKED: the kernel asks the parent (`engine.base.thread_binding`). IGNORED: the call has no
    effect but succeeds, because OpenMP ends the process after a failure.
    """

    REFUSED = "refused"
    ASKED = "asked"
    IGNORED = "ignored"


class Calls(Struct, frozen=True):
    """The system calls that a process may still use, of those that the filter restricts.

    `pid`, `parent`: process ids of the process and of its parent.
    `tcp`, `udp`, `unix`: whether the process may open sockets of this kind.
    `listens`: whether it accepts connections.
    `programs`: whether it starts programs; then it may also signal processes other than its parent.
    `binding`: treatment of calls that bind a thread by its id to processors. The calling thread (id 0) and the main
    thread (id `pid`) may always be bound; a filter cannot know the ids of the process's other threads.
    """

    pid: int
    parent: int
    tcp: bool = False
    udp: bool = False
    unix: bool = False
    listens: bool = False
    programs: bool = False
    binding: Binding = Binding.REFUSED


class _SyscallTable(NamedTuple):
    """The system call numbers of a CPU architecture.

    `architecture`: AUDIT_ARCH_* of `linux/audit.h`. `numbers`: numbers by name of the call.
    """

    architecture: int
    numbers: dict[str, int]


_SYSCALLS = {
    "x86_64": _SyscallTable(0xC000003E, {
        "socket": 41, "accept": 43, "sendto": 44, "sendmsg": 46, "listen": 50, "socketpair": 53, "clone": 56,
        "execve": 59, "kill": 62, "fcntl": 72, "ioctl": 16, "ptrace": 101, "prlimit64": 302,
        "rt_sigqueueinfo": 129, "pivot_root": 155, "chroot": 161, "mount": 165, "umount2": 166, "swapon": 167,
        "reboot": 169, "init_module": 175, "delete_module": 176, "tkill": 200, "tgkill": 234, "kexec_load": 246,
        "add_key": 248, "request_key": 249, "keyctl": 250, "unshare": 272, "accept4": 288, "rt_tgsigqueueinfo": 297,
        "perf_event_open": 298, "open_by_handle_at": 304, "sendmmsg": 307, "setns": 308, "process_vm_readv": 310,
        "process_vm_writev": 311, "finit_module": 313, "seccomp": 317, "kexec_file_load": 320, "bpf": 321,
        "execveat": 322, "userfaultfd": 323, "setpriority": 141, "sched_setparam": 142, "sched_setscheduler": 144,
        "sched_setaffinity": 203, "ioprio_set": 251, "migrate_pages": 256, "move_pages": 279, "sched_setattr": 314,
    }),
    "aarch64": _SyscallTable(0xC00000B7, {
        "fcntl": 25, "ioctl": 29, "socketpair": 199, "clone": 220, "prlimit64": 261,
        "umount2": 39, "mount": 40, "pivot_root": 41, "chroot": 51, "unshare": 97, "kexec_load": 104,
        "init_module": 105, "delete_module": 106, "ptrace": 117, "kill": 129, "tkill": 130, "tgkill": 131,
        "rt_sigqueueinfo": 138, "reboot": 142, "socket": 198, "listen": 201, "accept": 202, "sendto": 206,
        "sendmsg": 211, "add_key": 217, "request_key": 218, "keyctl": 219, "execve": 221, "swapon": 224,
        "rt_tgsigqueueinfo": 240, "perf_event_open": 241, "accept4": 242, "open_by_handle_at": 265, "setns": 268,
        "sendmmsg": 269, "process_vm_readv": 270, "process_vm_writev": 271, "finit_module": 273, "seccomp": 277,
        "bpf": 280, "execveat": 281, "userfaultfd": 282, "kexec_file_load": 294, "ioprio_set": 30,
        "sched_setparam": 118, "sched_setscheduler": 119, "sched_setaffinity": 122, "setpriority": 140,
        "migrate_pages": 238, "move_pages": 239, "sched_setattr": 274,
    }),
}  # fmt: skip
_COMMON = {
    "pidfd_send_signal": 424, "io_uring_setup": 425, "io_uring_enter": 426, "io_uring_register": 427, "open_tree": 428,
    "move_mount": 429, "fsopen": 430, "fsconfig": 431, "fsmount": 432, "pidfd_open": 434, "pidfd_getfd": 438,
    "clone3": 435, "process_madvise": 440, "mount_setattr": 442,
}  # fmt: skip
"""Numbers of system calls that are the same on x86_64 and aarch64, as all numbers from 424 on are."""

_NEVER = (
    "ptrace", "process_vm_readv", "process_vm_writev", "process_madvise", "pidfd_open", "pidfd_getfd",
    "pidfd_send_signal", "tkill", "io_uring_setup", "io_uring_enter", "io_uring_register", "bpf", "perf_event_open",
    "userfaultfd", "add_key", "request_key", "keyctl", "unshare", "setns", "chroot", "pivot_root", "mount", "umount2",
    "open_tree", "move_mount", "fsopen", "fsconfig", "fsmount", "mount_setattr", "open_by_handle_at", "init_module",
    "finit_module", "delete_module", "kexec_load", "kexec_file_load", "reboot", "swapon",
)  # fmt: skip
"""System calls that are always refused: no child and no driver needs them. io_uring would bypass every filter."""
_SIGNALLING = ("kill", "tgkill", "rt_sigqueueinfo", "rt_tgsigqueueinfo")
_PRIORITY = {"setpriority": 0, "ioprio_set": 1}
"""Calls that set a priority, each with the value of its first argument that selects a single process.

These values are PRIO_PROCESS and IOPRIO_WHO_PROCESS. The other values select process groups and users, and are refused.
"""
_SCHEDULING = ("sched_setparam", "sched_setscheduler", "sched_setaffinity", "sched_setattr", "migrate_pages",
               "move_pages")  # fmt: skip
"""System calls that can slow down another process of the user, or a thread of one.

They are refused for ids other than 0 (the calling thread) and our process id. Drivers and llama.cpp also try them for
other threads of this process, and ignore the error.
"""
_BINDING = "sched_setaffinity"
"""System call that binds threads to processors."""
_NAMESPACES = 0x7E020000
"""Mask of the flags CLONE_NEW*, which are refused.

In namespaces of its own a process has all capabilities, and can use more functions of the kernel.
"""
_OWNING = (8, 10, 15)
"""Commands of `fcntl` that are refused: F_SETOWN, F_SETSIG and F_SETOWN_EX.

With them, a process can make the kernel send any signal to another process when a file is ready.
"""
_SOCKET_OWNING = (0x8901, 0x8902)
"""Commands of `ioctl` that are refused: FIOSETOWN and SIOCSPGRP, which are F_SETOWN for sockets."""
_SENDING = {"sendto": 3, "sendmsg": 2, "sendmmsg": 3}
"""Index of the flags among the arguments of each call that sends."""
_FAST_OPEN = 0x20000000
"""The flag MSG_FASTOPEN. A call with this flag connects without `connect`, so Landlock would not check the port."""
_X32 = 0x40000000
"""Bit that marks system calls of the x32 interface of x86_64."""

_LOAD, _AND, _EQUAL, _AT_LEAST, _RETURN = 0x20, 0x54, 0x15, 0x35, 0x06
_INSTRUCTION = struct.Struct("HBBI")
_ALLOW, _REFUSE = 0x7FFF0000, 0x00050000 | errno.EACCES
_UNKNOWN = 0x00050000 | errno.ENOSYS
_ASK, _SUCCEED = 0x7FC00000, 0x00050000
"""Results of the filter: ask the parent (SECCOMP_RET_USER_NOTIF); succeed without effect (SECCOMP_RET_ERRNO with 0)."""
_BOUND = {Binding.REFUSED: _REFUSE, Binding.ASKED: _ASK, Binding.IGNORED: _SUCCEED}
_NUMBER, _ARCHITECTURE = 0, 4
_NEGATIVE = 1 << 31
_ALL_BITS = 0xFFFFFFFF
_SET_FILTER, _ACTION_AVAILABLE = 1, 2
_ALL_THREADS, _NEW_LISTENER, _THREAD_BY_ERROR = 1, 8, 16
"""The flags SECCOMP_FILTER_FLAG_TSYNC, NEW_LISTENER and TSYNC_ESRCH; TSYNC with NEW_LISTENER requires TSYNC_ESRCH."""
_SOCKET_TYPE = 0xF
"""Mask for the socket type; the other bits of the argument are flags, such as SOCK_CLOEXEC."""

_Instruction = tuple[int, int, int, int]


class _Test(NamedTuple):
    """A condition of the filter: the word at byte `offset` of `struct seccomp_data`, masked, equals one of `values`."""

    offset: int
    values: tuple[int, ...]
    mask: int = _ALL_BITS


def _argument(index: int, *values: int, mask: int = _ALL_BITS) -> _Test:
    # Six arguments of 8 bytes follow number, architecture and instruction pointer. The lower half comes first.
    return _Test(16 + 8 * index, tuple(value & _ALL_BITS for value in values), mask)


def seccomp_filter(calls: Calls, machine: str = "") -> bytes:
    """Return the BPF program (`linux/filter.h`) that refuses dangerous system calls, except those that `calls` allows.

    All other system calls stay allowed.

    `machine`: CPU architecture as in `platform.machine()`; empty: that of this computer. The result is empty for an
    unknown architecture.
    """
    known = _SYSCALLS.get(machine or platform.machine())
    if known is None:
        return b""
    number = {**known.numbers, **_COMMON}

    def call(*names: str) -> _Test:
        return _Test(_NUMBER, tuple(number[name] for name in names))

    # Another architecture numbers its calls otherwise, so that none of them is allowed.
    program: list[_Instruction] = [
        (_LOAD, 0, 0, _ARCHITECTURE),
        (_EQUAL, 1, 0, known.architecture),
        (_RETURN, 0, 0, _REFUSE),
        (_LOAD, 0, 0, _NUMBER),
        (_AT_LEAST, 0, 1, _X32),
        (_RETURN, 0, 0, _REFUSE),
    ]
    program += _when(_REFUSE, call(*_NEVER))
    for tests in _sockets(calls):
        program += _when(_ALLOW, call("socket"), *tests)
    program += _when(_REFUSE, call("socket"))
    if not calls.unix:
        # A socket of datagrams sends to any path, whether it is one of a pair or not.
        stream = _argument(1, socket.SOCK_STREAM, mask=_SOCKET_TYPE)
        program += _when(_ALLOW, call("socketpair"), stream)
        program += _when(_REFUSE, call("socketpair"))
    program += _when(_ALLOW, call("clone"), _argument(0, 0, mask=_NAMESPACES))
    program += _when(_REFUSE, call("clone"))
    # Its flags are in memory, which a filter cannot read. The C library then takes `clone`.
    program += _when(_UNKNOWN, call("clone3"))
    # The limit of processor time ends a process as a signal does.
    program += _when(_ALLOW, call("prlimit64"), _argument(0, 0, calls.pid))
    program += _when(_REFUSE, call("prlimit64"))
    for name, process in _PRIORITY.items():
        # 0 is the calling thread.
        program += _when(_ALLOW, call(name), _argument(0, process), _argument(1, 0, calls.pid))
        program += _when(_REFUSE, call(name))
    program += _when(_ALLOW, call(*_SCHEDULING), _argument(0, 0, calls.pid))
    program += _when(_BOUND[calls.binding], call(_BINDING))
    program += _when(_REFUSE, call(*_SCHEDULING))
    program += _when(_REFUSE, call("fcntl"), _argument(1, *_OWNING))
    program += _when(_REFUSE, call("ioctl"), _argument(1, *_SOCKET_OWNING))
    for name, argument in _SENDING.items():
        program += _when(_REFUSE, call(name), _argument(argument, _FAST_OPEN, mask=_FAST_OPEN))
    if not calls.listens:
        program += _when(_REFUSE, call("listen", "accept", "accept4"))
    program += _when(_ALLOW, call(*_SIGNALLING), _argument(0, calls.pid))
    if calls.programs:
        # 0 and negative numbers are groups of processes, to which the parent may belong.
        program += _when(_REFUSE, call(*_SIGNALLING), _argument(0, 0, calls.parent))
        program += _when(_REFUSE, call(*_SIGNALLING), _argument(0, _NEGATIVE, mask=_NEGATIVE))
    else:
        program += _when(_REFUSE, call(*_SIGNALLING))
        program += _when(_REFUSE, call("execve", "execveat"))
    return b"".join(_INSTRUCTION.pack(*each) for each in (*program, (_RETURN, 0, 0, _ALLOW)))


def _sockets(calls: Calls) -> Iterable[tuple[_Test, ...]]:
    """Yield the conditions (family, type, protocol) for each kind of socket that is allowed."""
    internet = _argument(0, socket.AF_INET, socket.AF_INET6)
    if calls.tcp:
        # Landlock sees TCP alone: Multipath TCP would connect to any port.
        stream = _argument(1, socket.SOCK_STREAM, mask=_SOCKET_TYPE)
        yield internet, stream, _argument(2, 0, socket.IPPROTO_TCP)
    if calls.udp:
        datagram = _argument(1, socket.SOCK_DGRAM, mask=_SOCKET_TYPE)
        yield internet, datagram, _argument(2, 0, socket.IPPROTO_UDP)
        # Name resolution asks the kernel for the addresses of this machine.
        yield _argument(0, _NETLINK), _argument(2, 0)
    if calls.unix:
        yield (_argument(0, _UNIX),)


_UNIX, _NETLINK = 1, 16
"""Address families AF_UNIX and AF_NETLINK, which Python's `socket` module has only on some systems."""


def _when(action: int, *tests: _Test) -> list[_Instruction]:
    """Return instructions that end the filter with `action` if all tests hold.

    If a test fails, the filter continues after these instructions.
    """
    body: list[_Instruction] = [(_RETURN, 0, 0, action)]
    for test in reversed(tests):
        masks = [(_AND, 0, 0, test.mask)] if test.mask != _ALL_BITS else []
        last = len(test.values) - 1
        # Jumps count the instructions that are skipped, if equal and if not.
        equal = [
            (_EQUAL, last - index, len(body) if index == last else 0, value) for index, value in enumerate(test.values)
        ]
        body = [(_LOAD, 0, 0, test.offset), *masks, *equal, *body]
    return body


class _Program(ctypes.Structure):
    """`struct sock_fprog` of `linux/filter.h`: the filter in the form that the seccomp call takes."""

    _fields_ = (("length", ctypes.c_ushort), ("filter", ctypes.c_void_p))


@cache
def can_refuse_calls() -> bool:
    """Return whether this system supports seccomp filters, and this module has the machine's system call numbers."""
    if not sys.platform.startswith("linux") or platform.machine() not in _SYSCALLS:
        return False
    # This fails if the kernel was built without filters.
    return _has_action(_REFUSE & ~0xFFFF)


@cache
def can_ask_parent() -> bool:
    """Return whether the kernel can ask another process about a call (Linux 5.0)."""
    return can_refuse_calls() and _has_action(_ASK)


def _has_action(action: int) -> bool:
    return int(_seccomp(_ACTION_AVAILABLE, 0, ctypes.byref(ctypes.c_uint32(action)))) == 0


def refuse_other_calls(calls: Calls, hand_over: Callable[[int], object] | None = None) -> bool:
    """Install the filter of `seccomp_filter` for all threads of this process; return whether the system can do that.

    Call `drop_privileges` of `engine.base.landlock` first. A refused call fails with EACCES.
    `hand_over`: called if `calls` has `Binding.ASKED`. Its argument is the descriptor through which the kernel asks
    about calls; the function passes it to the parent. If the kernel cannot ask, calls that bind a thread by its id have
    no effect (`Binding.IGNORED`).
    """
    if not can_refuse_calls():
        return False
    if calls.binding is Binding.ASKED:
        questions = _install(calls, _ALL_THREADS | _NEW_LISTENER | _THREAD_BY_ERROR)
        if questions >= 0 and hand_over is not None:
            hand_over(questions)
            return True
        # An older kernel, or one whose descriptor belongs to a container's filter.
        calls = replace(calls, binding=Binding.IGNORED)
    if calls.binding is Binding.IGNORED:
        # OpenMP bound this thread when it was loaded, and later threads begin with the processors of this one.
        with suppress(OSError):
            os.sched_setaffinity(0, os.sched_getaffinity(calls.parent))
    # A positive result is the number of a thread that cannot be bound, as with a filter of its own.
    return _install(calls, _ALL_THREADS) == 0


def _install(calls: Calls, flags: int) -> int:
    code = seccomp_filter(calls)
    kept = ctypes.create_string_buffer(code, len(code))
    program = _Program(len(code) // _INSTRUCTION.size, ctypes.addressof(kept))
    return int(_seccomp(_SET_FILTER, flags, ctypes.byref(program)))


def own_calls(
    *,
    tcp: bool = False,
    udp: bool = False,
    unix: bool = False,
    listens: bool = False,
    programs: bool = False,
    binding: Binding = Binding.REFUSED,
) -> Calls:
    """Return `Calls` for this process: with the arguments, and the process ids of this process and its parent."""
    return Calls(os.getpid(), os.getppid(), tcp, udp, unix, listens, programs, binding)


def _seccomp(operation: int, flags: int, argument: object) -> int:
    call = ctypes.CDLL(None).syscall
    call.restype = ctypes.c_long
    return int(call(_SYSCALLS[platform.machine()].numbers["seccomp"], operation, flags, argument))

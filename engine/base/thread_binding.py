"""Binding of a confined child's threads to processors, checked by the parent.

OpenMP, and ggml with a NUMA strategy, bind threads by their ids (`sched_setaffinity`). A seccomp filter can compare
such an id with fixed numbers only. It cannot know which ids belong to threads of the child. So the kernel asks the
parent about each such call (SECCOMP_RET_USER_NOTIF, seccomp_unotify(2)): `ThreadBinding` allows it for threads of the
child and refuses it for all others. The arguments of the call are numbers, which the child cannot change afterwards.

The child installs the filter and sends the kernel's descriptor for the questions through a socket that it inherits
(`hand_over`). A child without the environment variables of OpenMP or ggml that bind threads has no such socket, and may
not bind threads by id.
"""

from __future__ import annotations

import array
import os
import select
import socket
import struct
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from engine.base.seccomp import can_ask_parent

_OPENMP = ("GOMP_CPU_AFFINITY", "KMP_AFFINITY", "OMP_PLACES", "OMP_PROC_BIND")
"""Environment variables with which OpenMP binds threads to processors. If that fails, OpenMP ends the process."""
BINDS_THREADS = "LAYERDECK_BINDS_THREADS"
"""Environment variable of a child whose llama.cpp binds threads by itself, as ggml does with a NUMA strategy."""
_SOCKET = "LAYERDECK_THREAD_BINDING"
"""Environment variable with the descriptor of the socket that the child inherits."""

_RECEIVE, _SEND = 0xC0502100, 0xC0182101
"""SECCOMP_IOCTL_NOTIF_RECV and SECCOMP_IOCTL_NOTIF_SEND of `linux/seccomp.h`."""
_QUESTION, _ANSWER = struct.Struct("QIIiIQ6Q"), struct.Struct("QqiI")
"""Layouts of `struct seccomp_notif` and `struct seccomp_notif_resp`.

Field 6 of the first one, counted from 0, is the first argument of the call.
"""
_CONTINUE = 1
"""SECCOMP_USER_NOTIF_FLAG_CONTINUE: the kernel carries out the call."""
_EACCES = 13


def binds_threads(environment: Mapping[str, str]) -> bool:
    """Return whether OpenMP or ggml binds threads in a process with these environment variables."""
    return any(name in environment for name in (*_OPENMP, BINDS_THREADS))


class ThreadBinding:
    """Answers the kernel's question whether a child may bind a thread to processors (`sched_setaffinity`).

    The child may bind only its own threads. The object is used in the parent; call `close` if the child could not be
    started.
    """

    def __init__(self) -> None:
        self._own, self._theirs = socket.socketpair()

    @property
    def inherited(self) -> int:
        """Descriptor of the socket that the child must inherit."""
        return self._theirs.fileno()

    @property
    def environment(self) -> dict[str, str]:
        """The environment variable that tells the child the descriptor of its socket."""
        return {_SOCKET: str(self.inherited)}

    def close(self) -> None:
        """Close both sockets: that of the parent and that of the child."""
        self._own.close()
        self._theirs.close()

    def serve(self, pid: int) -> None:
        """Allow or refuse each call of the child `pid` to bind a thread, until the child ends. Blocks."""
        # The child has inherited it, so its end is the end of the connection.
        self._theirs.close()
        with self._own, suppress(OSError):
            _, descriptors, _, _ = socket.recv_fds(self._own, 1, 1, socket.MSG_CMSG_CLOEXEC)
            for questions in descriptors:
                try:
                    _answer_all(questions, self._own, pid)
                finally:
                    os.close(questions)


def _answer_all(questions: int, ending: socket.socket, pid: int) -> None:
    import fcntl

    poll = select.poll()
    poll.register(questions, select.POLLIN)
    poll.register(ending, select.POLLIN)
    while True:
        events = dict(poll.poll())
        if ending.fileno() in events or not events[questions] & select.POLLIN:
            return
        question = bytearray(_QUESTION.size)
        # The calling thread may have ended meanwhile, or a signal has interrupted its call.
        with suppress(FileNotFoundError, InterruptedError):
            fcntl.ioctl(questions, _RECEIVE, question)
            number, *_, thread, _, _, _, _, _ = _QUESTION.unpack(question)
            is_own = Path(f"/proc/{pid}/task/{thread & 0xFFFFFFFF}").exists()
            answer = _ANSWER.pack(number, 0, 0 if is_own else -_EACCES, _CONTINUE if is_own else 0)
            fcntl.ioctl(questions, _SEND, answer)


def make_thread_binding(environment: Mapping[str, str]) -> ThreadBinding | None:
    """Return a new `ThreadBinding` for a child with these environment variables.

    None if the child binds no threads, or if the kernel cannot ask the parent about calls.
    """
    if not binds_threads(environment) or not can_ask_parent():
        return None
    with suppress(OSError):
        return ThreadBinding()
    return None


def inherited_socket() -> int | None:
    """Return the descriptor of the socket to the parent's `ThreadBinding`; None if this process inherited none.

    Only the first call returns the descriptor. Children of this process do not inherit the socket.
    """
    named = os.environ.pop(_SOCKET, "")
    if not named.isdecimal():
        return None
    os.set_inheritable(int(named), False)
    return int(named)


def hand_over(questions: int, *, channel: int) -> None:
    """Send the descriptor `questions` to the parent, and close it in this process.

    `questions`: descriptor through which the kernel asks about calls of this process.
    `channel`: descriptor of the inherited socket. The system closes it when this process ends, so that the parent
    notices the end.
    """
    try:
        with socket.socket(fileno=channel) as sender:
            rights = (socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [questions]))
            sender.sendmsg([b"\0"], [rights])
            sender.detach()
    finally:
        os.close(questions)

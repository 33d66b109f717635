"""Tests the confinement of a real child: on SIGUSR1 each of its threads tries what the child must not do.

Python imports a module of this name at start if its folder is on PYTHONPATH, so the product needs no code for it.
Existing threads are reached as an attacker would: by a signal with a handler in native memory. Each thread writes a
JSON line with its results into a pipe that was opened before the confinement. An empty object ends the output.
"""

from __future__ import annotations

import _thread
import ctypes
import json
import os
import resource
import signal
import socket
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

_TOLD = os.environ.get("ATTEMPTS")
_kept: list[Any] = []
_PR_GET_NAME = 16


def _can(act: Callable[[], object]) -> bool:
    try:
        act()
    except OSError:
        return False
    return True


def _write(path: Path) -> None:
    path.write_text("x", encoding="ascii")
    path.unlink()


def _connect(port: int) -> None:
    with socket.socket() as each:
        each.connect(("127.0.0.1", port))


def _listen() -> None:
    with socket.socket() as each:
        each.bind(("127.0.0.1", 0))
        each.listen()


def _send_datagram(port: int) -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as each:
        each.sendto(b"x", ("127.0.0.1", port))


def _connect_local(path: str) -> None:
    with socket.socket(socket.AF_UNIX) as each:
        each.connect(path)


def _start() -> None:
    os.waitpid(os.posix_spawn("/bin/true", ["true"], {}), 0)


def _secrets(parent: int) -> bool:
    own = any("a-secret-of-the-user" in value for value in os.environ.values())
    return own or _can(Path(f"/proc/{parent}/environ").read_bytes) or _can(Path(f"/proc/{parent}/maps").read_bytes)


_NAMES = ("sched_setscheduler", "sched_setattr", "ioprio_set", "process_vm_readv", "ptrace")
_CALLS = {
    "x86_64": dict(zip(_NAMES, (144, 314, 251, 310, 101), strict=True)),
    "aarch64": dict(zip(_NAMES, (119, 274, 30, 270, 117), strict=True)),
}
_ATTACH, _DETACH, _LEAST_SCHED_ATTR = 0x4206, 17, 48


def _call(name: str, *arguments: object) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.syscall.restype = ctypes.c_long
    if libc.syscall(_CALLS[os.uname().machine][name], *arguments) < 0:
        raise OSError(ctypes.get_errno(), name)


def _schedules(task: int) -> bool:
    """Return whether any system call can change a thread of another process.

    Each call sets the present value again, so that a success changes nothing.
    """
    attributes = (ctypes.c_uint32 * 12)(_LEAST_SCHED_ATTR)
    buffer = ctypes.create_string_buffer(8)
    vector = (ctypes.c_void_p * 2)(ctypes.addressof(buffer), 8)
    zero = (ctypes.c_int * 1)(0)

    def trace() -> None:
        _call("ptrace", _ATTACH, task, 0, 0)
        _call("ptrace", _DETACH, task, 0, 0)

    return any(
        [
            _can(lambda: os.sched_setaffinity(task, range(os.cpu_count() or 1))),
            _can(lambda: os.setpriority(os.PRIO_PROCESS, task, 0)),
            _can(lambda: _call("sched_setscheduler", task, 0, zero)),
            _can(lambda: _call("sched_setattr", task, attributes, 0)),
            _can(lambda: _call("ioprio_set", 1, task, 2 << 13 | 4)),
            _can(lambda: resource.prlimit(task, resource.RLIMIT_CORE)),
            _can(lambda: _call("process_vm_readv", task, vector, 1, vector, 1, 0)),
            _can(trace),
        ]
    )


def _attempts(told: dict[str, Any], later: int) -> dict[str, bool]:
    home, parent, name = Path(told["home"]), int(told["parent"]), f"layerdeck-test-{threading.get_native_id()}"
    return {
        "read home": _can((home / ".ssh" / "id_ed25519").read_bytes),
        "write home": _can(lambda: _write(home / name)),
        "write /tmp": _can(lambda: _write(Path("/tmp", name))),
        "write /dev/shm": _can(lambda: _write(Path("/dev/shm", name))),
        "connect": _can(lambda: _connect(told["port"])),
        "listen": _can(_listen),
        "udp": _can(lambda: _send_datagram(told["port"])),
        "unix": _can(lambda: _connect_local(told["unix"])),
        "abstract": _can(lambda: _connect_local(f"\0{told['abstract']}")),
        "start": _can(_start),
        "signal the parent": _can(lambda: os.kill(parent, 0)),
        "schedule the parent": _schedules(parent),
        "schedule a thread of the parent": _schedules(int(told["thread"])),
        "schedule another process": _schedules(1),
        "schedule a later thread": _schedules(int(os.pread(later, 16, 0))),
        "secrets": _secrets(parent),
    }


def _install(told: dict[str, Any]) -> None:
    out = os.open(told["out"], os.O_WRONLY)
    # Opened now, because most children cannot read /proc afterwards.
    tasks = os.open("/proc/self/task", os.O_RDONLY)
    later = os.open(told["later"], os.O_RDONLY)
    libc = ctypes.CDLL(None)
    ended = threading.Semaphore(0)
    begun: list[bool] = []

    def attempt() -> None:
        try:
            able = _attempts(told, later)
        except BaseException as error:
            able = {repr(error): True}
        name = ctypes.create_string_buffer(16)
        libc.prctl(_PR_GET_NAME, name)
        thread = f"{threading.get_native_id()} {name.value.decode()}"
        os.write(out, (json.dumps({"thread": thread, "able": able}) + "\n").encode())

    def begin(*_: object) -> None:
        # The signal may come again, see `Attempts.of`.
        if begun:
            return
        begun.append(True)
        attempt()
        found = os.listdir(tasks)  # noqa: PTH208 - of a descriptor
        # A thread that is busy in Python must not run Python in a handler of a signal.
        others = set() if "ATTEMPTS_BUSY" in os.environ else {*map(int, found)} - {threading.get_native_id()}
        for task in others:
            if libc.tgkill(os.getpid(), task, signal.SIGUSR2) == 0:
                ended.acquire(timeout=30)
        # Not a `Thread`: the handler may interrupt `Thread.start`, which holds a lock then.
        tried = _thread.allocate_lock()
        tried.acquire()

        def last() -> None:
            attempt()
            tried.release()

        _thread.start_new_thread(last, ())
        tried.acquire(timeout=30)
        os.write(out, b"{}\n")

    def attempt_of_another(_number: int) -> None:
        attempt()
        ended.release()

    handler = ctypes.CFUNCTYPE(None, ctypes.c_int)(attempt_of_another)
    _kept.append(handler)
    libc.signal.argtypes = (ctypes.c_int, ctypes.c_void_p)
    libc.signal(signal.SIGUSR2, ctypes.cast(handler, ctypes.c_void_p))
    signal.signal(signal.SIGUSR1, begin)


if _TOLD:
    _install(json.loads(_TOLD))

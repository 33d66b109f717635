"""Rights that a child gives up, tried from inside the child."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from engine.base.confinement import code_folders, device_folders, make_driver_caches
from engine.base.landlock import landlock_version
from engine.runtime.process.system import spawn

needs_landlock = pytest.mark.skipif(not landlock_version(), reason="this system has no Landlock")

CHILD = """
import resource, subprocess, sys
from pathlib import Path
from engine.base.confinement import LOAD, confine, refuse_core_files

own, folder, other = map(Path, sys.argv[1:])
refuse_core_files()
confine(LOAD, (own,), (folder,))
assert resource.getrlimit(resource.RLIMIT_CORE)[0] == 0


def refused(act):
    try:
        act()
    except OSError:
        return True
    return False


assert own.read_text() == "own"
assert refused(lambda: own.write_text("changed"))
assert refused(other.read_text)
assert refused(lambda: other.write_text("changed"))
assert refused(other.unlink)
assert refused(lambda: list(other.parent.iterdir()))
assert refused(lambda: other.with_name("new").write_text("new"))
assert refused(lambda: own.rename(folder / "moved"))
assert refused(lambda: Path.home().joinpath(".layerdeck-test").write_text(""))
(folder / "a").write_text("a")
(folder / "a").rename(folder / "b")
assert (folder / "b").read_text() == "a"
Path("/dev/null").write_text("x")
# children of it have no more than it has, and run
assert subprocess.run([sys.executable, "-c", "print(open(%r).read())" % str(other)], capture_output=True).returncode
assert "NoNewPrivs:\\t1" in Path("/proc/self/status").read_text()
print("done")
"""


@needs_landlock
def test_a_child_opens_what_it_was_told_and_nothing_else(tmp_path: Path) -> None:
    own, folder, other = tmp_path / "own", tmp_path / "folder", tmp_path / "others" / "other"
    folder.mkdir()
    other.parent.mkdir()
    own.write_text("own")
    other.write_text("other")
    root = Path(__file__).parents[2]
    done = subprocess.run(
        [sys.executable, "-P", "-c", CHILD, str(own), str(folder), str(other)],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(root)},
        check=False,
    )
    assert done.stdout == "done\n", done.stderr
    assert (own.read_text(), other.read_text()) == ("own", "other")


def test_folders_of_drivers_are_made_for_the_backends_that_are_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("CUDA_CACHE_PATH", raising=False)
    make_driver_caches(["CPU", "RPC"])
    assert not list(tmp_path.iterdir())
    make_driver_caches(["CUDA"])
    assert [path.name for path in tmp_path.iterdir()] == [".nv"]
    assert tmp_path / ".nv" in device_folders()


def test_what_the_environment_names_for_a_driver_is_within_reach(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept, libraries, pipes = tmp_path / "kept", tmp_path / "libraries", tmp_path / "pipes"
    monkeypatch.setenv("CUDA_CACHE_PATH", str(kept))
    monkeypatch.setenv("CUDA_MPS_PIPE_DIRECTORY", str(pipes))
    monkeypatch.setenv("LD_LIBRARY_PATH", f":{libraries}")
    make_driver_caches(["CUDA"])
    assert kept.is_dir()
    assert {kept, pipes} <= set(device_folders())
    assert libraries in code_folders()
    assert Path() not in code_folders()


RIGHTS = """
import ctypes, fcntl, json, os, resource, signal, socket, struct, subprocess, sys, threading
from pathlib import Path
from engine.base.confinement import IMAGE, LOAD, confine

allowed, other, parent = map(int, sys.argv[1:4])
mode = sys.argv[4]
if mode == "decoder":
    assert confine(IMAGE)
else:
    assert confine(LOAD, ports=(allowed,), resolves_names=mode == "named")


def can(act):
    try:
        act()
    except OSError:
        return False
    return True


def connect(address, family=socket.AF_INET):
    with socket.socket(family) as each:
        each.connect(address)


def listen():
    with socket.socket() as each:
        each.bind(("127.0.0.1", 0))


def send_from_pair():
    for each in socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM):
        each.sendto(b"x", sys.argv[5])


def clone(flags):
    libc = ctypes.CDLL(None)
    libc.syscall.restype = ctypes.c_long
    number = {"x86_64": 56, "aarch64": 220}[os.uname().machine]
    child = libc.syscall(number, flags | signal.SIGCHLD, 0, 0, 0, 0)
    if child == 0:
        os._exit(0)
    if child < 0:
        raise OSError
    os.waitpid(child, 0)


def in_thread(act=lambda: None):
    found = []
    thread = threading.Thread(target=lambda: found.append(can(act)))
    thread.start()
    thread.join()
    return found[0]


def call(name, *arguments):
    libc = ctypes.CDLL(None, use_errno=True)
    libc.syscall.restype = ctypes.c_long
    numbers = {"x86_64": (251, 203, 314), "aarch64": (30, 122, 274)}[os.uname().machine]
    number = dict(zip(("ioprio_set", "sched_setaffinity", "sched_setattr"), numbers))[name]
    if libc.syscall(number, *arguments) < 0:
        raise OSError(ctypes.get_errno(), name)


ALL = (ctypes.c_ubyte * 128)(*[255] * 128)
USUAL = 2 << 13 | 4

pipe = os.pipe()
ends = socket.socketpair()
in_thread()
usual = os.getpriority(os.PRIO_PROCESS, 0)
os.setpriority(os.PRIO_PROCESS, 0, usual)
os.setpriority(os.PRIO_PROCESS, os.getpid(), usual)
os.sched_setaffinity(0, os.sched_getaffinity(0))
os.sched_setaffinity(os.getpid(), os.sched_getaffinity(0))
resource.prlimit(os.getpid(), resource.RLIMIT_CORE)
fcntl.fcntl(pipe[0], fcntl.F_SETFD, 1)
clone(0)
print(json.dumps({
    "datagram of a pair": can(send_from_pair),
    "limit the parent": can(lambda: resource.prlimit(parent, resource.RLIMIT_CORE)),
    "let a file signal the parent": can(lambda: fcntl.fcntl(pipe[0], fcntl.F_SETOWN, parent)),
    "let a socket signal the parent": can(lambda: fcntl.ioctl(ends[0], 0x8901, struct.pack("i", parent))),
    "let a socket signal the group": can(lambda: fcntl.ioctl(ends[0], 0x8902, struct.pack("i", -os.getpgrp()))),
    "slow down the parent": can(lambda: os.setpriority(os.PRIO_PROCESS, parent, usual)),
    "slow down the group": can(lambda: os.setpriority(os.PRIO_PGRP, 0, usual)),
    "slow down the parent's disk": can(lambda: call("ioprio_set", 1, parent, USUAL)),
    "move the parent": can(lambda: call("sched_setaffinity", parent, 128, ALL)),
    "bind a thread": in_thread(lambda: os.sched_setaffinity(threading.get_native_id(), os.sched_getaffinity(0))),
    "move an older process": can(lambda: os.sched_setaffinity(1, os.sched_getaffinity(0))),
    "namespace": can(lambda: clone(0x10000000)),
    "allowed port": can(lambda: connect(("127.0.0.1", allowed))),
    "other port": can(lambda: connect(("127.0.0.1", other))),
    "listen": can(listen),
    "look up a name": can(lambda: socket.socket(socket.AF_INET, socket.SOCK_DGRAM).close()),
    "abstract socket": can(lambda: connect(chr(0) + f"layerdeck-test-{parent}", socket.AF_UNIX)),
    "signal the parent": can(lambda: os.kill(parent, 0)),
    "signal itself": can(lambda: os.kill(os.getpid(), 0)),
    "another program": can(lambda: subprocess.run(["/bin/true"], check=True)),
    "start a program": can(lambda: subprocess.run([sys.executable, "-c", ""], check=True)),
}))
"""


@needs_landlock
@pytest.mark.skipif(landlock_version() < 6, reason="this kernel's Landlock restricts files only")
@pytest.mark.parametrize("mode", ["engine", "named", "decoder"])
def test_a_child_connects_signals_and_starts_what_it_needs(mode: str, tmp_path: Path) -> None:
    root = Path(__file__).parents[2]
    with (
        socket.create_server(("127.0.0.1", 0)) as allowed,
        socket.create_server(("127.0.0.1", 0)) as other,
        socket.socket(socket.AF_UNIX) as abstract,
        socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as datagrams,
    ):
        datagrams.bind(str(tmp_path / "datagrams"))
        abstract.bind(f"\0layerdeck-test-{os.getpid()}")
        abstract.listen()
        numbers = [str(each.getsockname()[1]) for each in (allowed, other)]
        done = subprocess.run(
            [sys.executable, "-P", "-c", RIGHTS, *numbers, str(os.getpid()), mode, str(tmp_path / "datagrams")],
            capture_output=True,
            text=True,
            env={**os.environ, "PYTHONPATH": str(root)},
            check=False,
        )
    assert done.returncode == 0, done.stderr
    needs = set() if mode == "decoder" else {"allowed port", "start a program"}
    needs |= {"look up a name", "datagram of a pair"} if mode == "named" else set()
    assert {name for name, can in json.loads(done.stdout).items() if can} == {"signal itself", *needs}


def test_no_child_gets_the_secrets_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HF_TOKEN", "OPENAI_API_KEY", "SSH_AUTH_SOCK", "AWS_SECRET_ACCESS_KEY", "DB_PASSWORD"):
        monkeypatch.setenv(name, "a-secret-of-the-user")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "seen")
    child = spawn([sys.executable, "-c", "import os; print(dict(os.environ))"], {})
    said, _ = child.communicate()
    assert "seen" in said.decode()
    assert "a-secret-of-the-user" not in said.decode()

"""Confinement of a child before it reads foreign files: no new rights, no core files, few folders, no network.

Linux lets an unprivileged process restrict itself (Landlock, since kernel 5.13). On other systems, and on kernels built
without Landlock, a child runs unconfined and `landlock_version` returns 0. The constants are those of
`linux/landlock.h` and `linux/prctl.h`, since the standard library has no binding for them.
"""

from __future__ import annotations

import ctypes
import os
import stat
import sys
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

# Numbers of system calls from 424 on are the same on all architectures but Alpha.
_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446
_VERSION_FLAG = 1
_RULE_PATH_BENEATH = 1
_PR_SET_NO_NEW_PRIVS = 38
_O_PATH = 0o10000000

_EXECUTE, _WRITE_FILE, _READ_FILE, _READ_DIR = 1 << 0, 1 << 1, 1 << 2, 1 << 3
_TRUNCATE = 1 << 14
_FIRST_RIGHTS = (1 << 13) - 1
_RIGHTS_SINCE = {2: 1 << 13, 3: _TRUNCATE}
"""Additional file rights, by the Landlock version that introduced them. Device ioctls (version 5) stay allowed, because
drivers need them.

A right that a ruleset does not handle stays allowed, and a kernel refuses rights newer than its version.
"""
_READING = _READ_FILE | _READ_DIR
_OF_FILES = _EXECUTE | _WRITE_FILE | _READ_FILE | _TRUNCATE
"""The only rights that a rule for a file, as opposed to a folder, may name."""


_RULE_NET_PORT = 2
NETWORK_SINCE, SCOPES_SINCE = 4, 6
"""Landlock versions since which TCP ports, and signals and abstract Unix sockets, can be restricted. UDP and Unix
sockets with a path cannot.
"""
_BIND_TCP, _CONNECT_TCP = 1 << 0, 1 << 1
_ABSTRACT_SOCKETS, _SIGNALS = 1 << 0, 1 << 1


class _RulesetAttributes(ctypes.Structure):
    _fields_ = (
        ("handled_access_fs", ctypes.c_uint64),
        ("handled_access_net", ctypes.c_uint64),
        ("scoped", ctypes.c_uint64),
    )


class _NetPort(ctypes.Structure):
    _fields_ = (("allowed_access", ctypes.c_uint64), ("port", ctypes.c_uint64))


@dataclass(frozen=True, slots=True)
class Ports:
    """TCP ports that a confined process may use. `connect`: to connect to; `listen`: to listen on; None: any."""

    connect: tuple[int, ...] | None = ()
    listen: tuple[int, ...] | None = ()


NO_NETWORK = Ports()
ANY_PORT = Ports(None, None)


class _PathBeneath(ctypes.Structure):
    # `struct landlock_path_beneath_attr` is packed.
    _pack_ = 1
    _fields_ = (("allowed_access", ctypes.c_uint64), ("parent_fd", ctypes.c_int32))


def landlock_version() -> int:
    """Return the Landlock version of this kernel; 0 without Landlock, and a child then has all our rights."""
    if not sys.platform.startswith("linux"):
        return 0
    # With this flag the call returns the version instead of a ruleset, and -1 if the kernel lacks Landlock.
    return max(0, int(_system_call()(_CREATE_RULESET, None, 0, _VERSION_FLAG)))


def limits_memory() -> bool:
    """Return whether this system enforces a memory limit of its own on a child. Linux does, for private memory."""
    return sys.platform.startswith("linux")


def refuse_core_files() -> None:
    """Disable core files for this process. A core file would hold the user's conversations."""
    if sys.platform == "win32":
        return
    import resource

    # the hard limit stays: a debugger that the user sets up on purpose may raise it
    with suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))


def confine(
    readable: Iterable[Path], writable: Iterable[Path], ports: Ports = NO_NETWORK, *, starts_programs: bool = False
) -> bool:
    """Restrict this process to these files and to everything below these folders; return whether the system can do
    that.

    Newer kernels also restrict TCP to `ports`, and let it send signals to itself and its own children only.
    `starts_programs`: whether programs among the readable files may be started; they are confined in the same way.
    This cannot be undone. It drops all additional rights and applies to later threads and children. Open files stay
    usable. Call it while the process has a single thread: Landlock does not restrict other threads.
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
        attributes.handled_access_net = _CONNECT_TCP * (ports.connect is not None) | _BIND_TCP * (
            ports.listen is not None
        )
    if version >= SCOPES_SINCE:
        attributes.scoped = _ABSTRACT_SOCKETS | _SIGNALS
    reading = _READING | (_EXECUTE if starts_programs else 0)
    ruleset = int(call(_CREATE_RULESET, ctypes.byref(attributes), ctypes.sizeof(attributes), 0))
    if ruleset < 0:
        return False
    try:
        for path in readable:
            _allow(ruleset, path, reading)
        for path in writable:
            _allow(ruleset, path, handled & ~_EXECUTE)
        if attributes.handled_access_net:
            for rights, numbers in ((_CONNECT_TCP, ports.connect), (_BIND_TCP, ports.listen)):
                for port in numbers or ():
                    call(_ADD_RULE, ruleset, _RULE_NET_PORT, ctypes.byref(_NetPort(rights, port)), 0)
        # An unprivileged process may only restrict itself once it can gain no privileges, as by a set-uid program.
        if ctypes.CDLL(None).prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) != 0:
            return False
        return int(call(_RESTRICT_SELF, ruleset, 0)) == 0
    finally:
        os.close(ruleset)


def code_folders() -> tuple[Path, ...]:
    """Return the folders of this program's code, its libraries and the system's libraries, which every child reads."""
    # The bundle's executable, which is its own child, lies beside what it brings.
    program = (str(Path(sys.executable).parent),) if getattr(sys, "frozen", False) else ()
    own = (str(Path(__file__).resolve().parents[2]), *sys.path, sys.prefix, sys.base_prefix, *program)
    # drivers load parts of theirs by name, late: the linker then looks here
    linked = os.environ.get("LD_LIBRARY_PATH", "").split(os.pathsep)
    system = ("/usr", "/lib", "/lib64", "/opt", "/nix", "/etc")
    return tuple(Path(folder) for folder in dict.fromkeys((*own, *linked, *system)) if folder)


def system_folders() -> tuple[Path, ...]:
    """Return the folders from which drivers and the engine read facts about the hardware."""
    home = Path.home()
    own = (home / ".local/share/vulkan", home / ".config/vulkan", home / ".drirc")
    return (Path("/proc"), Path("/sys"), Path("/run"), Path("/var/run"), Path("/tmp/nvidia-mps"), *own)


def device_folders() -> tuple[Path, ...]:
    """Return the paths to which drivers write: devices, the pipes of a shared CUDA context, and shader caches."""
    pipes = os.environ.get("CUDA_MPS_PIPE_DIRECTORY")
    kept = (folder for folders in _driver_caches().values() for folder in folders)
    return (Path("/dev"), *((Path(pipes),) if pipes else ()), *kept)


def make_driver_caches(backends: Iterable[str]) -> None:
    """Create the folders in which the drivers of these ggml backends cache compiled kernels.

    A confined driver cannot create missing folders. It would compile all kernels again in each process.
    """
    for backend in backends:
        for folder in _driver_caches().get(backend, ()):
            with suppress(OSError):
                folder.mkdir(mode=0o700, parents=True, exist_ok=True)


def _driver_caches() -> dict[str, tuple[Path, ...]]:
    home = Path.home()
    cache = Path(os.environ.get("XDG_CACHE_HOME") or home / ".cache")
    compiled = os.environ.get("CUDA_CACHE_PATH")
    mesa = Path(os.environ.get("MESA_SHADER_CACHE_DIR") or cache)
    return {
        "CUDA": (Path(compiled) if compiled else home / ".nv",),
        "Vulkan": (cache / "nvidia", mesa / "mesa_shader_cache", mesa / "mesa_shader_cache_db"),
    }


def _allow(ruleset: int, path: Path, rights: int) -> None:
    """Add a rule for a path; a path that does not exist needs none."""
    try:
        descriptor = os.open(path, _O_PATH | os.O_CLOEXEC)
    except (OSError, ValueError):
        return
    try:
        # The kernel rejects a rule for a file with rights that concern folders, such as making files.
        if not stat.S_ISDIR(os.fstat(descriptor).st_mode):
            rights &= _OF_FILES
        rule = _PathBeneath(rights, descriptor)
        _system_call()(_ADD_RULE, ruleset, _RULE_PATH_BENEATH, ctypes.byref(rule), 0)
    finally:
        os.close(descriptor)


def _system_call() -> ctypes._NamedFuncPointer:
    call = ctypes.CDLL(None).syscall
    # The default of ctypes is int, which would cut the result of `syscall` on 64 bits.
    call.restype = ctypes.c_long
    return call

"""What a child gives up before it touches what strangers wrote: new rights, core files, and most of the file system.

Linux lets a process do this to itself without asking for rights (Landlock, from kernel 5.13); elsewhere, and where the
kernel was built without it, a child works as ever and `landlock_version` says so. The numbers are those of
`linux/landlock.h` and `linux/prctl.h`, which no binding of the standard library has.
"""

from __future__ import annotations

import ctypes
import os
import stat
import sys
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446
_VERSION_FLAG = 1
_RULE_PATH_BENEATH = 1
_PR_SET_NO_NEW_PRIVS = 38
_O_PATH = 0o10000000

_EXECUTE, _WRITE_FILE, _READ_FILE, _READ_DIR = 1 << 0, 1 << 1, 1 << 2, 1 << 3
_TRUNCATE = 1 << 14
_FIRST_RIGHTS = (1 << 13) - 1
_RIGHTS_SINCE = {2: 1 << 13, 3: _TRUNCATE}
"""Further rights over files, by the version that has them. Device commands (version 5) stay allowed: drivers need them.

What a ruleset does not handle stays allowed, and a version does not know later rights.
"""
_READING = _EXECUTE | _READ_FILE | _READ_DIR
_OF_FILES = _EXECUTE | _WRITE_FILE | _READ_FILE | _TRUNCATE
"""The only rights that a rule on what is no folder may name."""


class _RulesetAttributes(ctypes.Structure):
    _fields_ = (("handled_access_fs", ctypes.c_uint64),)


class _PathBeneath(ctypes.Structure):
    _pack_ = 1
    _fields_ = (("allowed_access", ctypes.c_uint64), ("parent_fd", ctypes.c_int32))


def landlock_version() -> int:
    """Return the version of Landlock that this system has; 0: none, and a child can read and write what we can."""
    if not sys.platform.startswith("linux"):
        return 0
    return max(0, int(_system_call()(_CREATE_RULESET, None, 0, _VERSION_FLAG)))


def limits_memory() -> bool:
    """Return whether this system refuses a child memory beyond a limit of its own (Linux counts what is private)."""
    return sys.platform.startswith("linux")


def refuse_core_files() -> None:
    """Have the system keep no image of this process's memory, which holds the user's conversations, when it breaks."""
    if sys.platform == "win32":
        return
    import resource

    # the hard limit stays: a debugger that the user sets up on purpose may raise it
    with suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))


def confine(readable: Iterable[Path], writable: Iterable[Path]) -> bool:
    """Give up, for good and with all threads and children to come, everything but these files and what is below these
    folders, and all further rights; return whether the system can do that. Nothing that is open already is lost.

    It is for a process with a single thread: another thread keeps what it had.
    """
    version = landlock_version()
    if not version:
        return False
    handled = _FIRST_RIGHTS
    for since, rights in _RIGHTS_SINCE.items():
        handled |= rights if version >= since else 0
    call = _system_call()
    attributes = _RulesetAttributes(handled)
    ruleset = int(call(_CREATE_RULESET, ctypes.byref(attributes), ctypes.sizeof(attributes), 0))
    if ruleset < 0:
        return False
    try:
        for path in readable:
            _allow(ruleset, path, _READING)
        for path in writable:
            _allow(ruleset, path, handled)
        if ctypes.CDLL(None).prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) != 0:
            return False
        return int(call(_RESTRICT_SELF, ruleset, 0)) == 0
    finally:
        os.close(ruleset)


def code_folders() -> tuple[Path, ...]:
    """Return where this program's code, its libraries and the system's are, which every child of ours reads."""
    # The bundle's executable, which is its own child, lies beside what it brings.
    program = (str(Path(sys.executable).parent),) if getattr(sys, "frozen", False) else ()
    own = (str(Path(__file__).resolve().parents[2]), *sys.path, sys.prefix, sys.base_prefix, *program)
    # drivers load parts of theirs by name, late: the linker then looks here
    linked = os.environ.get("LD_LIBRARY_PATH", "").split(os.pathsep)
    system = ("/usr", "/lib", "/lib64", "/opt", "/nix", "/etc")
    return tuple(Path(folder) for folder in dict.fromkeys((*own, *linked, *system)) if folder)


def system_folders() -> tuple[Path, ...]:
    """Return where drivers and the engine look for what this machine is and has."""
    home = Path.home()
    own = (home / ".local/share/vulkan", home / ".config/vulkan", home / ".drirc")
    return (Path("/proc"), Path("/sys"), Path("/run"), Path("/var/run"), Path("/tmp/nvidia-mps"), *own)


def device_folders() -> tuple[Path, ...]:
    """Return where drivers write: the devices, the pipes of a shared CUDA context, and what they keep."""
    pipes = os.environ.get("CUDA_MPS_PIPE_DIRECTORY")
    kept = (folder for folders in _driver_caches().values() for folder in folders)
    return (Path("/dev"), *((Path(pipes),) if pipes else ()), *kept)


def make_driver_caches(backends: Iterable[str]) -> None:
    """Make the folders in which the drivers of these backends of ggml keep the programs that they compiled.

    A confined driver cannot make them where they are not there yet, and would compile everything anew in each process.
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
    """Add a rule; a path that is not there needs none."""
    try:
        descriptor = os.open(path, _O_PATH | os.O_CLOEXEC)
    except (OSError, ValueError):
        return
    try:
        if not stat.S_ISDIR(os.fstat(descriptor).st_mode):
            rights &= _OF_FILES
        rule = _PathBeneath(rights, descriptor)
        _system_call()(_ADD_RULE, ruleset, _RULE_PATH_BENEATH, ctypes.byref(rule), 0)
    finally:
        os.close(descriptor)


def _system_call() -> ctypes._NamedFuncPointer:
    call = ctypes.CDLL(None).syscall
    call.restype = ctypes.c_long
    return call

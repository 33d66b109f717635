"""The access rights of each kind of child process after its first request, and the rules that enforce them.

`TABLE` has a `Rights` row for each kind of child, from which all rules are made. Linux enforces them: Landlock
(`engine.base.landlock`) for files, TCP ports, signals and programs, and seccomp (`engine.base.seccomp`) for system
calls that Landlock cannot refuse. On macOS and Windows children have all rights of the user: the interface of macOS'
sandbox is deprecated and its profiles are not documented, and Windows' AppContainer must be set up by the parent. On
every system children get no secrets from our environment variables (`engine.runtime.process.system`).
"""

from __future__ import annotations

import os
import platform
import re
import sys
from collections.abc import Iterable
from contextlib import suppress
from functools import cache, partial
from pathlib import Path

from msgspec import Struct

from engine.base.landlock import (
    NETWORK_SINCE,
    SCOPES_SINCE,
    THREADS_SINCE,
    TRUNCATING_SINCE,
    Reach,
    drop_privileges,
    landlock_version,
    restrict,
)
from engine.base.seccomp import Binding, can_refuse_calls, own_calls, refuse_other_calls
from engine.base.thread_binding import binds_threads, hand_over, inherited_socket
from engine.base.values import replace

_MIB, _GIB = 1 << 20, 1 << 30


class Rights(Struct, frozen=True):
    """The access rights of one kind of child process. Each child may also read its own code and the system's libraries.

    `reads`, `writes`: descriptions of the files that the child reads and writes, whose paths are in its request. Empty:
    no files.
    `uses_drivers`: whether the child reads facts about hardware, and writes to devices and to the caches of drivers.
    `connects`: TCP ports to which the child may connect: "" (none), "endpoints" (those in its request), or "any".
    `listens`: whether the child accepts TCP connections.
    `uses_udp`: whether the child resolves names or searches the network.
    `uses_local_sockets`: whether the child uses Unix sockets, for services that resolve names.
    `starts_renderer`: whether the child starts our template renderer, whose rights are not wider than its own.
    `memory_bytes`: private memory or address space that the child may add after its start; 0: no fixed limit.
    `memory`: if there is no fixed limit, a description of what limits the child's memory.

    No child may signal processes other than itself and its children, trace them, read or write their memory, or change
    their priority, processors or limits. No child gets secrets of the environment.
    """

    name: str
    reads: str = ""
    writes: str = ""
    uses_drivers: bool = False
    connects: str = ""
    listens: bool = False
    uses_udp: bool = False
    uses_local_sockets: bool = False
    starts_renderer: bool = False
    memory_bytes: int = 0
    memory: str = ""


DISCOVERY = Rights("discovery", uses_drivers=True, connects="endpoints", memory_bytes=4 * _GIB)
"""Rights of the child that lists devices. The memory limit is high, because drivers of many cards take gigabytes."""
PROBE = Rights("probe", "model", uses_drivers=True, connects="endpoints", memory="as its header needs")
LOAD = Rights(
    "load",
    "model, adapters, projector",
    "saved KV states",
    uses_drivers=True,
    connects="endpoints",
    starts_renderer=True,
    memory="1 GiB for a step on foreign text",
)
VOCABULARY = Rights("vocabulary", "model", starts_renderer=True, memory_bytes=4 * _GIB)
"""Rights of the child that reads a vocabulary. A vocabulary of 260,000 tokens takes some hundred MiB of memory."""
SPEED = Rights("speed", uses_drivers=True, connects="endpoints", memory="as the measurement needs")
QUANTISE = Rights("quantise", "model", "folder of the new file", memory="as the model needs")
SERVE = Rights("serve", "", "kept weights", uses_drivers=True, listens=True, memory="cap of the device")
LIBRARY = Rights("library", "folders of models", memory="none")
_DECODER = Rights("")
PDF = replace(_DECODER, name="pdf", memory_bytes=_GIB)
IMAGE = replace(_DECODER, name="image", memory_bytes=_GIB)
SOUND = replace(_DECODER, name="sound", memory_bytes=_GIB)
FORMULA = replace(_DECODER, name="formula", memory_bytes=512 * _MIB)
RENDERER = replace(_DECODER, name="renderer", memory_bytes=256 * _MIB)
IMPORTER = Rights("importer", "the file", "folder of the database", memory="none")
DOWNLOAD = Rights("download", "", "folders of its files", connects="any", uses_udp=True, memory="none")
TUNNEL = Rights(
    "tunnel", "key of this machine", connects="any", listens=True, uses_udp=True, uses_local_sockets=True, memory="none"
)
NEARBY = Rights("nearby", uses_udp=True, memory_bytes=256 * _MIB)
"""Rights of the child that finds machines nearby. Too many announcements end the child by its memory limit."""

TABLE = (
    LOAD, PROBE, DISCOVERY, VOCABULARY, SPEED, QUANTISE, SERVE, LIBRARY, PDF, IMAGE, SOUND, FORMULA, RENDERER, IMPORTER,
    DOWNLOAD, TUNNEL, NEARBY,
)  # fmt: skip
"""Access rights of child processes: one row for each kind of child."""


def cells(rights: Rights) -> dict[str, str]:
    """Return one row of the table of rights that `doctor` prints: the text of each cell, by column name."""
    drivers = "drivers" if rights.uses_drivers else ""
    tcp = [f"to {rights.connects}" if rights.connects else "", "listens" if rights.listens else ""]
    size = rights.memory_bytes
    limit = f"{size >> 30} GiB" if size >= _GIB else f"{size >> 20} MiB"
    return {
        "child": rights.name,
        "reads": _joined(rights.reads, drivers),
        "writes": _joined(rights.writes, "devices" if rights.uses_drivers else ""),
        "TCP": _joined(*tcp),
        "UDP": "yes" if rights.uses_udp else "names" if rights.connects == "endpoints" else "no",
        "Unix sockets": "yes" if rights.uses_local_sockets else "NVIDIA, names" if rights.uses_drivers else "no",
        "programs": "renderer" if rights.starts_renderer else "no",
        "signals": "own children" if rights.starts_renderer else "no",
        "scheduling": "own",
        "secrets": "no",
        "memory": limit if size else rights.memory,
    }


def _joined(*words: str) -> str:
    return ", ".join(filter(None, words)) or "no"


def missing_protections() -> tuple[str, ...]:
    """Return a sentence for each restriction of child processes that this system cannot enforce.

    Empty if it can enforce all of them.
    """
    if not sys.platform.startswith("linux"):
        system = {"darwin": "macOS", "win32": "Windows"}.get(sys.platform, sys.platform)
        return (f"Children are not confined on {system}: they reach all that you can, apart from your secrets.",)
    version = landlock_version()
    sentences = {
        1: "Children reach all your files: this kernel has no Landlock (Linux 5.13 and later).",
        TRUNCATING_SINCE: "Children can empty files that they cannot read (Landlock before version 3).",
        NETWORK_SINCE: "Children that may connect can connect to any TCP port (Landlock before version 4).",
        SCOPES_SINCE: "A child that starts the renderer can signal your programs (Landlock before version 6).",
        THREADS_SINCE: "Threads that drivers start early keep their access to files (Landlock before version 8).",
    }
    lacking = [sentence for since, sentence in sentences.items() if version < since]
    if not can_refuse_calls():
        lacking.append(
            f"Children can use UDP and Unix sockets, and change the priority of your programs: seccomp is missing, or "
            f"unknown for {platform.machine()}."
        )
    # Without Landlock the other sentences about it say nothing more.
    return tuple(each for each in lacking if version or "before version" not in each)


def limits_memory() -> bool:
    """Return whether this system limits the private memory of a child; only Linux does."""
    return sys.platform.startswith("linux")


def refuse_core_files() -> None:
    """Disable core dumps for this process, because they would contain the user's conversations."""
    if sys.platform == "win32":
        return
    import resource

    # the hard limit stays: a debugger that the user sets up on purpose may raise it
    with suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))


def confine(
    rights: Rights,
    readable: Iterable[Path] = (),
    writable: Iterable[Path] = (),
    ports: Iterable[int] = (),
    *,
    resolves_names: bool = False,
) -> bool:
    """Restrict this process to `rights`; return whether the system enforces all of these rights.

    The restriction cannot be undone, and also applies to threads and children that start later. Call this while the
    process has a single thread: before version 8, Landlock does not restrict other existing threads. Files and
    connections that are open already stay usable.
    `rights`: the access rights of the process's kind of child.
    `readable`, `writable`: files and folders that the child reads and writes for its request.
    `ports`: TCP ports of the endpoints that the process connects to.
    `resolves_names`: whether some endpoints are host names instead of IP addresses.
    """
    if not sys.platform.startswith("linux"):
        return False
    system = (*_FACTS, *(system_folders() if rights.uses_drivers else ()))
    _pin(system)
    reach = Reach(
        readable=(*code_folders(), *_BASIC, *system, *readable),
        writable=(*_BASIC, *(device_folders() if rights.uses_drivers else ()), *writable),
        programs=_own_programs() if rights.starts_renderer else (),
        connect=None if rights.connects == "any" else tuple(ports),
        listen=None if rights.listens else (),
    )
    binding, ask = Binding.REFUSED, None
    if binds_threads(os.environ):
        channel = inherited_socket()
        binding, ask = (
            (Binding.IGNORED, None) if channel is None else (Binding.ASKED, partial(hand_over, channel=channel))
        )
    calls = own_calls(
        tcp=bool(rights.connects) or rights.listens,
        udp=rights.uses_udp or resolves_names,
        # A multicast DNS name (.local) is resolved by a service behind such a socket.
        unix=rights.uses_local_sockets or resolves_names or (rights.uses_drivers and _has_nvidia()),
        listens=rights.listens,
        programs=rights.starts_renderer,
        binding=binding,
    )
    # Both are tried in any case: a kernel may have one of them.
    return all([drop_privileges(), restrict(reach), refuse_other_calls(calls, ask)])


def early_threads() -> tuple[str, ...]:
    """Return the names of this process's other threads that Landlock does not restrict. Call it right after `confine`.

    Libraries and drivers start such threads while they are loaded. The seccomp filter applies to them too.
    """
    if not landlock_version() or landlock_version() >= THREADS_SINCE:
        return ()
    names = []
    for task in Path("/proc/self/task").iterdir():
        if task.name != str(os.getpid()):
            with suppress(OSError):
                names.append((task / "comm").read_text(encoding="utf-8", errors="replace").strip())
    return tuple(names)


_BASIC = tuple(Path("/dev", name) for name in ("null", "zero", "full", "random", "urandom"))


_FACTS = (
    *(Path("/proc", name) for name in ("self", "cpuinfo", "meminfo", "stat", "version", "sys")),
    Path("/sys/devices/system"),
)
"""Files and folders with facts about the machine and the process itself, which every child may read.

The rest of /proc shows other processes, and to root also their environment variables.
"""
_pinned: list[int] = []


def _pin(paths: Iterable[Path]) -> None:
    """Keep these paths of /proc open for the lifetime of the process.

    Landlock rules refer to inodes. Without open files the kernel may drop inodes of /proc and create others later, to
    which the rules do not apply.
    """
    for path in paths:
        if path.parts[1:2] == ("proc",):
            with suppress(OSError):
                _pinned.append(os.open(path, os.O_PATH | os.O_CLOEXEC))


@cache
def _own_programs() -> tuple[Path, ...]:
    """Return the files that run when our program starts: the interpreter, and the dynamic linker that loads it."""
    with suppress(OSError):
        maps = Path("/proc/self/maps").read_text(encoding="utf-8", errors="replace")
        linkers = {line.split(maxsplit=5)[-1] for line in maps.splitlines() if _LINKER.search(line)}
        return (Path(os.path.realpath(sys.executable)), *map(Path, sorted(linkers)))
    return (Path(os.path.realpath(sys.executable)),)


_LINKER = re.compile(r"/ld(?:-[\w.-]+)?\.so[\w.]*$")


def _has_nvidia() -> bool:
    """Return whether NVIDIA's driver is installed.

    The access rights depend on this, because the driver creates Unix sockets: to share memory, and for a shared CUDA
    context (MPS).
    """
    return any(Path(path).exists() for path in ("/dev/nvidiactl", "/dev/dxg"))


def code_folders() -> tuple[Path, ...]:
    """Return the folders of this program's code, its libraries and the system's libraries, which every child reads."""
    # The bundle's executable, which is its own child, lies beside what it brings.
    program = (str(Path(sys.executable).parent),) if getattr(sys, "frozen", False) else ()
    own = (str(Path(__file__).resolve().parents[2]), *sys.path, sys.prefix, sys.base_prefix, *program)
    # drivers load parts of theirs by name, late: the linker then looks here
    linked = os.environ.get("LD_LIBRARY_PATH", "").split(os.pathsep)
    system = ("/usr", "/lib", "/lib64", "/opt", "/nix", "/etc", *_RESOLVERS)
    return tuple(Path(folder) for folder in dict.fromkeys((*own, *linked, *system)) if folder)


_RESOLVERS = ("/run/systemd/resolve", "/run/resolvconf", "/run/NetworkManager")
"""Folders that may contain the target of the link /etc/resolv.conf. Every child reads this file.

The rest of /run has sockets and files of the user's session.
"""
_DRIVERS = (
    "/proc/bus", "/proc/device-tree", "/proc/devices", "/proc/driver", "/proc/filesystems", "/proc/modules",
    "/run/opengl-driver", "/run/opengl-driver-32", "/run/current-system", "/run/udev", "/run/nvidia-persistenced",
    "/run/nvidia-topologyd",
)  # fmt: skip
_DEVICES = (
    "accel*", "dma_heap", "dri", "dxg", "kfd", "kgsl*", "mali*", "nvhost*", "nvgpu*", "nvidia*", "nvmap", "udmabuf",
    "davinci*", "devmm_svm", "hisi_hdc",
)  # fmt: skip
"""Name patterns in /dev of graphics cards and accelerators, to which drivers write.

The rest of /dev has terminals, and shared memory of other programs (shm).
"""
_MPS = Path("/tmp/nvidia-mps")


def system_folders() -> tuple[Path, ...]:
    """Return the folders from which drivers and the engine read facts about the hardware."""
    home = Path.home()
    own = (home / ".local/share/vulkan", home / ".config/vulkan", home / ".drirc")
    return (Path("/sys"), *map(Path, _DRIVERS), *own)


def device_folders() -> tuple[Path, ...]:
    """Return the paths to which drivers write: devices, the pipes of a shared CUDA context, and shader caches."""
    pipes = Path(os.environ.get("CUDA_MPS_PIPE_DIRECTORY") or _MPS)
    # Processes that share a CUDA context share memory too, and AMD's driver names some [unverified on a card].
    shares = pipes.exists() or Path("/dev/kfd").exists()
    shared = (pipes, Path("/dev/shm")) if shares else (pipes,)
    devices = (path for pattern in _DEVICES for path in Path("/dev").glob(pattern))
    kept = (folder for folders in _driver_caches().values() for folder in folders)
    return (*devices, *shared, *kept)


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

"""Runs this child as an RPC worker: ggml's RPC server in a thread, with a limit on its memory.

ggml's server accepts every connection. A worker for paired machines must accept only those of the tunnel, which
receives connections over TLS and forwards them. So on Linux a socket filter (classic BPF) on the listening socket drops
packets from all source ports except the tunnel's. Another user cannot send from that port: the tunnel has it bound.
"""

from __future__ import annotations

import ctypes
import os
import socket
import struct
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path

from engine.base.errors import EngineError
from engine.base.numa import bind_to_node, read_nodes
from engine.base.units import GIB
from engine.base.weight_cache import LOOK_S, WeightCacheTrimmer
from engine.runtime.child.native.bindings import Bindings
from engine.runtime.child.native.devices import CPU_ID
from engine.runtime.child.native.failures import failure
from engine.runtime.child.native.rights import data_bytes, limit_data
from engine.runtime.protocol.messages import Serving
from engine.runtime.protocol.own_sockets import own_sockets
from engine.runtime.protocol.requests import Serve

_SO_ATTACH_FILTER = 26
_LOAD_HALF, _JUMP_EQUAL, _RETURN = 0x28, 0x15, 0x06
"""Opcodes of linux/filter.h.

The filter of a TCP socket sees a packet from its TCP header on, which begins with the source port.
"""
_INSTRUCTION = struct.Struct("HBBI")
_ALL = 0xFFFFFFFF


def admit_only(listening: int, client_port: int) -> bool:
    """Make a listening socket drop packets from source ports other than `client_port`.

    Return whether the system supports this. Existing connections stay open. `listening`: descriptor of the socket.
    """
    if not sys.platform.startswith("linux"):
        return False
    # Load the half word at offset 0, the source port. If it is `client_port`, accept the whole packet; else skip that
    # instruction, and drop it.
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


SLACK_BYTES = 8 << 20
"""Memory in bytes that the server may use above the cap, for graphs, replies and pages of the allocator.

Measured: 3.4 MiB with a model of 252 MiB.
"""
RECEIVE_DIVISOR = 64
"""Divisor of the memory cap. The result is added to the cap, for the server's receive buffer.

The buffer holds a whole tensor while the server copies it to the device. The largest tensors of a model may need more
room. Then a plan that uses the whole cap fails. Large caps get more room (`LARGE_CAP_BYTES`).
"""
LARGE_CAP_BYTES = 8 * GIB
"""Size in bytes above which a memory cap counts as large.

For the receive buffer a large cap gets a quarter of the bytes above this size, at most `LARGEST_RECEIVE_BYTES`, unless
the result of `RECEIVE_DIVISOR` is larger. Workers with large caps hold models of hundreds of GB, which have large
tensors. The caps of lab rigs (RPC workers on this machine) are smaller, and little is added to them.
"""
LARGEST_RECEIVE_BYTES = 4 * GIB
"""Most bytes that are added to a large cap: room for a tensor with all experts of a layer.

In DeepSeek with 671B parameters this tensor has 3.72 GiB as Q8_0, and 1.97 GiB as Q4_K.
"""
DEFAULT_STACK_BYTES = 2 << 20
SERVER_STACK_BYTES = 1 << 20
KEEPER_STACK_BYTES = 256 << 10
START_SECONDS = 10.0
LISTENING, CONNECTED = "0A", "01"
"""TCP states of listening and connected sockets in /proc/net/tcp."""
TABLE = Path("/proc/net/tcp")


def serve(engine: Bindings, request: Serve) -> Serving:
    """Start the RPC server, and return when its socket accepts connections. It runs until the process ends.

    Raises:
        RequestError: no such device, the address cannot be used, or the server did not start.
    """
    device = engine.cpu_device() if request.device == CPU_ID else engine.device_by_name(request.device.encode())
    if not device:
        names = ", ".join(engine.device_name(known) for known in engine.devices())
        raise failure("argument", f"There is no device {request.device} to serve; choose one of {names}.")
    port = request.port or _free_port(request.host)
    _check_address(request.host, port)
    _keep_weights(request, port)
    # Before the server's thread starts: it inherits the binding, and so do the threads that compute.
    is_memory_bound = _bind(request)
    ended = threading.Event()
    # RLIMIT_DATA counts thread stacks, of which the default is 8 MiB: small stacks leave the cap to clients.
    threading.stack_size(SERVER_STACK_BYTES)
    thread = threading.Thread(target=_run, args=(engine, request, port, device, ended), name="rpc-server", daemon=True)
    thread.start()
    # 0 is the default size again, for threads of libraries.
    threading.stack_size(0)
    _wait_until_listening(request.host, port, ended)
    is_guarded = request.client_port is not None and _guard(port, request.client_port)
    # After the start, so that what the server itself takes is not counted against the cap.
    baseline_bytes, enforced = data_bytes(), False
    if request.cap_bytes is not None:
        enforced = limit_data(baseline_bytes + request.cap_bytes + _slack_bytes(request.cap_bytes, request.n_threads))
    return Serving(
        port=port,
        caps_enforced=enforced,
        baseline_bytes=baseline_bytes,
        is_guarded=is_guarded,
        is_memory_bound=is_memory_bound,
    )


def _bind(request: Serve) -> bool:
    """Bind this thread to the NUMA node of the request; return whether memory is bound as well as processors."""
    if request.numa_node is None:
        return False
    node = next((each for each in read_nodes() if each.number == request.numa_node and each.can_serve), None)
    if node is None:
        raise failure("argument", f"There is no NUMA node {request.numa_node} with processors and memory here.")
    try:
        return bind_to_node(node)
    except OSError as error:
        raise failure(
            "argument", f"The processors of NUMA node {node.number} cannot be used: {error.strerror or error}."
        ) from None


def _run(engine: Bindings, request: Serve, port: int, device: int, ended: threading.Event) -> None:
    devices = (ctypes.c_void_p * 1)(device)
    endpoint = f"{request.host}:{port}".encode()
    folder = None if request.weight_cache is None else request.weight_cache.encode()
    engine.rpc_start_server(endpoint, folder, request.n_threads, 1, ctypes.addressof(devices))
    # The server returns only if it cannot listen or accept.
    ended.set()


def _keep_weights(request: Serve, port: int) -> None:
    """Start a thread that checks the folder of cached weights and keeps it within its quota."""
    if request.weight_cache is None:
        return
    keeper = WeightCacheTrimmer(Path(request.weight_cache), request.cache_quota_bytes)
    try:
        keeper.begin()
    except EngineError as error:
        raise failure("argument", error.summary()) from None

    def look() -> None:
        while True:
            time.sleep(LOOK_S)
            # Without this thread nothing would keep the quota. The worker's cap may leave no memory for a moment.
            with suppress(OSError, MemoryError):
                keeper.look(_client(port))

    threading.stack_size(KEEPER_STACK_BYTES)
    threading.Thread(target=look, name="kept-weights", daemon=True).start()
    threading.stack_size(0)


def _client(port: int) -> str:
    """Return a text that identifies the server's present client: the inodes of the client's connections.

    The text is empty if there is no client, or if the system has no /proc/net/tcp.
    """
    # Connections that the server has not accepted yet have no descriptor.
    return ",".join(sorted(_inodes(port, CONNECTED) & dict(own_sockets()).keys())) if TABLE.exists() else ""


def _free_port(host: str) -> int:
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        try:
            probe.bind((host, 0))
        except OSError as error:
            raise failure("argument", f"Cannot listen on {host}: {error.strerror or error}.") from None
        return int(probe.getsockname()[1])


def _check_address(host: str, port: int) -> None:
    """Raise `RequestError` with the system's reason if the address cannot be used.

    The address is bound once to get that reason, because ggml's server does not log one.
    """
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except (OSError, OverflowError) as error:
            reason = getattr(error, "strerror", None) or error
            raise failure(
                "argument",
                f"Cannot listen on {host}:{port}: {reason}. Choose another port or a numeric address of this computer.",
            ) from None


def _wait_until_listening(host: str, port: int, ended: threading.Event) -> None:
    # ggml's server does not report that it listens, so that the system's table is read every 5 ms.
    deadline = time.monotonic() + START_SECONDS
    while not is_listening(host, port):
        if ended.wait(0.005):
            raise failure("internal", f"The RPC server on {host}:{port} ended as it started.")
        if time.monotonic() > deadline:
            raise failure("internal", f"The RPC server on {host}:{port} did not start in {START_SECONDS:.0f} s.")


def is_listening(host: str, port: int) -> bool:
    """Return whether this process listens at an address.

    The answer comes from /proc/net/tcp, because a test connection would take the only place in the server's backlog.
    """
    if sys.platform.startswith("linux") and TABLE.exists():
        # The socket must be ours: another process may have taken the port since it was found free.
        return not _inodes(port, LISTENING).isdisjoint(dict(own_sockets()))
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        return probe.connect_ex((host, port)) == 0


def _inodes(port: int, state: str) -> set[str]:
    """Return the inodes of this machine's TCP sockets with local port `port`. `state`: `LISTENING` or `CONNECTED`."""
    # Line by line: the table may have thousands of rows, and the memory of a capped worker is limited.
    with TABLE.open(encoding="ascii") as lines:
        next(lines)
        rows = (line.split() for line in lines)
        return {row[9] for row in rows if row[3] == state and int(row[1].rpartition(":")[2], 16) == port}


def _guard(port: int, client_port: int) -> bool:
    """Make the server's socket accept only connections from `client_port`; return False if that is impossible."""
    if not TABLE.exists():
        return False
    own = dict(own_sockets())
    # ggml opens the socket, so that it has to be found by its inode.
    doors = [own[inode] for inode in _inodes(port, LISTENING) if inode in own]
    if not doors or not all(admit_only(door, client_port) for door in doors):
        return False
    # The filter came after listen(). A connection from between stays open, so that the worker gives up.
    if _inodes(port, CONNECTED):
        raise failure(
            "busy", f"Another program connected to port {port} before access was restricted; start the worker again."
        )
    return True


def _slack_bytes(cap_bytes: int, n_threads: int) -> int:
    """Return the memory in bytes that the server needs besides tensors: receive buffers, and stacks of its threads.

    `cap_bytes`: limit of the memory for tensors.
    `n_threads`: number of compute threads.
    """
    if not sys.platform.startswith("linux"):
        return 0
    import resource

    stack_bytes, _ = resource.getrlimit(resource.RLIMIT_STACK)
    if stack_bytes == resource.RLIM_INFINITY:
        stack_bytes = DEFAULT_STACK_BYTES
    large_bytes = min(LARGEST_RECEIVE_BYTES, (cap_bytes - LARGE_CAP_BYTES) // 4)
    return SLACK_BYTES + max(cap_bytes // RECEIVE_DIVISOR, large_bytes) + (n_threads - 1) * stack_bytes

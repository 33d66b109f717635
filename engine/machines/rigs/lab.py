"""RPC workers with memory caps, which serve devices of this machine to itself (`LabRig`) or to others (`serve`).

The devices of a lab rig are simulated, or the NUMA nodes of this machine (`numa_rig`).
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from msgspec import Struct, field

from engine.base.cancellation import CancelToken
from engine.base.errors import ArgumentError, EngineError, WorkerStalledError
from engine.base.language import tr
from engine.base.numa import NumaNode, numa_sentence, numbers_text, serving_nodes
from engine.base.processor import read_processor
from engine.base.units import MIB
from engine.base.values import replace
from engine.base.weight_cache import WEIGHT_CACHE_QUOTA_BYTES
from engine.devices.device import Device, Rig
from engine.devices.endpoint import GreetingStatus, greet_all
from engine.devices.telemetry.processes import WorkerProcess
from engine.machines.rigs.discovery import host_device
from engine.runtime.process.blocking_child import error_of
from engine.runtime.process.child import ChildProcess
from engine.runtime.process.outcome import ProcessOutcome
from engine.runtime.protocol.messages import AnyMessage, Failure, Serving
from engine.runtime.protocol.requests import SERVE_ENVIRONMENT, Serve

START_TIMEOUT_S = 60.0
MIN_CAP_BYTES = MIB
CAPS_NOT_ENFORCED = tr(
    "This system cannot limit a worker's memory. Layouts are planned with the memory caps, but a worker can use more."
)
NODE_MARGIN_SHARE = 8
"""Divisor of a NUMA node's free memory: 1/8 of it is left for layers on the CPU, the window and other programs."""
_LOCAL_HOST = "127.0.0.1"
_QUIT_S = 0.5
_END_TIMEOUT_S = 5.0
_UNTIL_POLL_S = 0.25


class ServingChild:
    """A child process that serves one device over RPC: an RPC worker.

    Its states are starting, serving and ended.

    `request`: address, device and memory cap of the worker.
    `argv`: command of the child, None for the default one.
    """

    def __init__(self, request: Serve, *, argv: Sequence[str] | None = None, name: str = "rpc-worker") -> None:
        self._request = request
        self._condition = threading.Condition()
        self._serving: Serving | None = None
        self._failure: Failure | None = None
        self._outcome: ProcessOutcome | None = None
        self._on_ended: Callable[[str], None] | None = None
        self._child = ChildProcess(
            self._take,
            self._take_end,
            argv=argv,
            stall_limit_s=START_TIMEOUT_S,
            name=name,
            environment=SERVE_ENVIRONMENT,
        )

    @property
    def pid(self) -> int | None:
        return self._child.pid

    @property
    def serving(self) -> Serving | None:
        """The first message of a worker that accepts connections; it states the worker's port. None before this
        message.
        """
        return self._serving

    def start(self) -> None:
        """Start the process and send the request. Called once; `wait_until_serving` waits for the worker."""
        self._child.start()
        self._child.send(self._request)

    def wait_until_serving(self, deadline_s: float) -> Serving:
        """Wait until the worker accepts connections, at most until the time `deadline_s` of the monotonic clock.

        Raises:
            EngineError: if the worker fails, ends, or is not ready in time.
        """
        with self._condition:
            self._condition.wait_for(self._is_settled, max(0.0, deadline_s - time.monotonic()))
            if self._failure is not None:
                raise error_of(self._failure, self._request)
            if self._outcome is not None:
                raise self._outcome.error()
            if self._serving is None:
                raise WorkerStalledError(
                    tr(
                        "The worker did not start in time, perhaps because this computer is busy. Close other programs "
                        "and try again."
                    )
                )
            return self._serving

    def set_on_ended(self, on_ended: Callable[[str], None]) -> None:
        """Set the callback for an unexpected end of the worker. It is called with a sentence that describes the end.

        If the worker has ended already, the callback is called at once.
        """
        with self._condition:
            self._on_ended = on_ended
            outcome = self._outcome
        if outcome is not None:
            on_ended(outcome.sentence)

    def wait_for_end(self, timeout_s: float) -> ProcessOutcome | None:
        """Wait at most `timeout_s` seconds for the worker to end; return None if it still runs."""
        return self._child.wait(timeout_s)

    def begin_stop(self) -> None:
        """Ask the worker to stop, without waiting for its end. The callback for an unexpected end is not called.

        May be called in every state and any number of times.
        """
        with self._condition:
            self._on_ended = None
        self._child.stop(quit_s=_QUIT_S)

    def _is_settled(self) -> bool:
        return self._serving is not None or self._failure is not None or self._outcome is not None

    def _take(self, message: AnyMessage) -> None:
        with self._condition:
            # From here on silence is normal: a worker without a client says nothing.
            if isinstance(message, Serving):
                self._serving = message
                self._child.watch(False)
            elif isinstance(message, Failure):
                self._failure = message
            self._condition.notify_all()

    def _take_end(self, outcome: ProcessOutcome) -> None:
        with self._condition:
            self._outcome = outcome
            on_ended = self._on_ended
            self._condition.notify_all()
        # Without the lock: the callback is foreign code, and may wait for a thread that needs it.
        if on_ended is not None:
            on_ended(outcome.sentence)


class _Worker(Struct, frozen=True):
    child: ServingChild
    device: Device
    baseline_bytes: int


class _Started(Struct):
    children: list[ServingChild] = field(default_factory=list)
    workers: dict[str, _Worker] = field(default_factory=dict)


class LabRig:
    """RPC workers with memory caps on this machine: simulated devices, or its NUMA nodes.

    Device ids are RPC0, RPC1 ... in the order of the caps, or NODE0, NODE1 ... by the numbers of the nodes.

    `nodes`: the NUMA node to which each worker is bound, in the order of the caps; empty: none is bound.

    `start`, or a `with` block, starts all workers. After that, `rig` has their devices. `close` ends all workers. They
    also end when this process is killed, because their standard input closes.

    If a worker ends by itself, `on_worker_ended` is called with its id and a sentence. The call is in the thread that
    supervises the worker's process. `restart` starts the worker again.
    """

    def __init__(
        self,
        caps_bytes: Sequence[int],
        *,
        nodes: Sequence[NumaNode] = (),
        on_worker_ended: Callable[[str, str], None] | None = None,
        argv: Sequence[str] | None = None,
        start_timeout_s: float = START_TIMEOUT_S,
    ) -> None:
        self._caps_bytes = tuple(caps_bytes)
        self._nodes = tuple(nodes) or (None,) * len(self._caps_bytes)
        self._on_worker_ended = on_worker_ended
        self._argv = argv
        self._start_timeout_s = start_timeout_s
        self._lock = threading.Lock()
        self._started = _Started()
        self._closed = False
        self._rig: Rig | None = None

    def __enter__(self) -> LabRig:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def rig(self) -> Rig:
        """The workers' devices and the host, as they were at the start."""
        if self._rig is None:
            raise RuntimeError("the lab rig has not been started")
        return self._rig

    @property
    def caps_enforced(self) -> bool:
        """Whether the system enforces the memory caps. If not, the text `CAPS_NOT_ENFORCED` is shown."""
        servings = [worker.child.serving for worker in self._started.workers.values()]
        return bool(servings) and all(serving is not None and serving.caps_enforced for serving in servings)

    @property
    def has_nodes(self) -> bool:
        """Whether the workers are bound to NUMA nodes."""
        return any(node is not None for node in self._nodes)

    @property
    def unbound_nodes(self) -> tuple[str, ...]:
        """Ids of workers that are bound to the processors of a NUMA node, but not to its memory."""
        return tuple(
            device_id
            for (device_id, worker), node in zip(self._started.workers.items(), self._nodes, strict=True)
            if node is not None and worker.child.serving is not None and not worker.child.serving.is_memory_bound
        )

    def start(self) -> Rig:
        """Start all workers in parallel, and wait until each accepts connections. The wait has a time-out.

        Raises:
            ArgumentError: if there are no workers, or a cap is too small.
            EngineError: if a worker does not start; the others are stopped first.
        """
        if not self._caps_bytes:
            raise ArgumentError(
                tr(
                    "A lab rig (workers on this computer) needs at least one worker; "
                    "--workers 512MiB,512MiB starts two."
                )
            )
        if small := [cap_bytes for cap_bytes in self._caps_bytes if cap_bytes < MIN_CAP_BYTES]:
            raise ArgumentError(
                tr("A lab worker of {small} bytes is too small; each worker needs at least 1 MiB.", small=small[0])
            )
        try:
            self._start_all()
        # Also for KeyboardInterrupt: workers that have started must not outlive the failed start.
        except BaseException:
            self.close()
            raise
        self._rig = Rig(tuple(worker.device for worker in self._started.workers.values()), host_device())
        # Only now: a worker that dies during the start is reported by the error of `start` alone.
        for device_id, worker in self._started.workers.items():
            worker.child.set_on_ended(partial(self._report_end, device_id))
        return self._rig

    def restart(self, device_id: str) -> None:
        """Restart a worker that has ended, on its old port, so that plans with its endpoint remain valid.

        Does nothing if the worker runs. Waits, with a time-out, until the worker accepts connections.

        Raises:
            EngineError: if the worker does not start, for instance because another program uses the port now.
        """
        old = self._started.workers[device_id]
        if old.child.wait_for_end(0) is None:
            return
        index = list(self._started.workers).index(device_id)
        # ggml's server sets SO_REUSEADDR, so the port can be bound again while old connections are in TIME_WAIT.
        port = int((old.device.endpoint or "").rpartition(":")[2])
        child = self._begin(index, port, old.device.total_bytes)
        try:
            serving = self._wait(index, child, time.monotonic() + self._start_timeout_s)
            self._greet([old.device])
        except BaseException:
            child.begin_stop()
            raise
        self._started.workers[device_id] = _Worker(child, old.device, serving.baseline_bytes)
        child.set_on_ended(partial(self._report_end, device_id))

    def close(self) -> None:
        """Stop all workers and wait for their end, with a time-out.

        May be called in every state, in any thread and any number of times.
        """
        # Read under the lock: `start` in another thread may be adding children.
        with self._lock:
            self._closed = True
            children = tuple(self._started.children)
        # All are told to stop before any is waited for, so that the waits overlap.
        for child in children:
            child.begin_stop()
        deadline_s = time.monotonic() + _END_TIMEOUT_S
        for child in children:
            child.wait_for_end(max(0.0, deadline_s - time.monotonic()))

    def pid(self, device_id: str) -> int | None:
        """Return the process id of a worker; None if the rig has no worker with this device id."""
        worker = self._started.workers.get(device_id)
        return None if worker is None else worker.child.pid

    @property
    def ended(self) -> frozenset[str]:
        """Ids of the workers whose processes have ended."""
        workers = self._started.workers.items()
        return frozenset(device_id for device_id, each in workers if each.child.wait_for_end(0) is not None)

    @property
    def processes(self) -> dict[str, WorkerProcess]:
        """The process of each worker, by endpoint: its process id, and its memory before a client was connected."""
        return {
            endpoint: WorkerProcess(pid, worker.baseline_bytes)
            for worker in self._started.workers.values()
            if (endpoint := worker.device.endpoint) is not None and (pid := worker.child.pid) is not None
        }

    def baseline_bytes(self, device_id: str) -> int:
        """Return the data size of a worker's process (VmData) in bytes, measured before its client allocated memory.

        0 if the rig has no worker with this device id.
        """
        worker = self._started.workers.get(device_id)
        return 0 if worker is None else worker.baseline_bytes

    def _start_all(self) -> None:
        # All of them first: they start in parallel.
        for index, cap_bytes in enumerate(self._caps_bytes):
            self._begin(index, 0, cap_bytes)
        deadline_s = time.monotonic() + self._start_timeout_s
        for index, (child, cap_bytes) in enumerate(zip(self._started.children, self._caps_bytes, strict=True)):
            serving = self._wait(index, child, deadline_s)
            device = _lab_device(index, self._nodes[index], serving.port, cap_bytes)
            self._started.workers[device.id] = _Worker(child, device, serving.baseline_bytes)
        # A child says that it serves; the greeting proves that its port answers with ggml's protocol.
        self._greet([worker.device for worker in self._started.workers.values()])

    def _begin(self, index: int, port: int, cap_bytes: int) -> ServingChild:
        """Start the process of a worker and return it.

        `index`: position of the worker in the rig's lists of caps and NUMA nodes.
        `port`: TCP port of the worker; 0: the system chooses one.
        `cap_bytes`: memory cap of the worker.
        """
        request = Serve(host=_LOCAL_HOST, port=port, cap_bytes=cap_bytes)
        node = self._nodes[index]
        if node is not None:
            threads = read_processor(node.processors).threads
            request = replace(request, numa_node=node.number, n_threads=threads)
        child = ServingChild(request, argv=self._argv, name=f"lab-{index}")
        # Under the lock, so that `close` in another thread either sees this child or prevents its start.
        with self._lock:
            if self._closed:
                raise EngineError(tr("The lab rig was closed while its workers were starting."))
            self._started.children.append(child)
            child.start()
        return child

    def _wait(self, index: int, child: ServingChild, deadline_s: float) -> Serving:
        try:
            return child.wait_until_serving(deadline_s)
        except EngineError as error:
            raise type(error)(
                tr("Lab worker {index} did not start. {error}", index=index, error=error.summary())
            ) from error

    def _greet(self, devices: Sequence[Device]) -> None:
        names = {device.endpoint or "": device.name for device in devices}
        for endpoint, greeting in greet_all(names).items():
            if greeting.status is not GreetingStatus.OK:
                raise EngineError(
                    tr("{names} did not start: {sentence}", names=names[endpoint], sentence=greeting.sentence)
                )

    def _report_end(self, device_id: str, sentence: str) -> None:
        if self._on_worker_ended is not None and not self._closed:
            self._on_worker_ended(
                device_id, tr("{device_id} (lab worker) stopped. {sentence}", device_id=device_id, sentence=sentence)
            )


class WeightCache(Struct, frozen=True):
    """The cache of model weights that workers keep on the disk.

    `folder`: folder with a subfolder for each worker.
    `quota_bytes`: largest size of each subfolder.
    """

    folder: Path
    quota_bytes: int = WEIGHT_CACHE_QUOTA_BYTES


def make_folder(folder: Path) -> Path:
    """Create a folder and return its path. Raises `EngineError` if it cannot be created."""
    # The child cannot create it: its confinement allows only folders that exist.
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise EngineError(
            tr(
                "Weights cannot be cached in {folder}: {strerror}. Check the permissions of the folder.",
                folder=folder,
                strerror=error.strerror or error,
            )
        ) from None
    return folder


def serve(
    *,
    port: int,
    host: str = _LOCAL_HOST,
    device: str = "CPU",
    cap_bytes: int | None = None,
    kept: WeightCache | None = None,
    until: CancelToken | None = None,
    on_serving: Callable[[Serving], None] | None = None,
) -> None:
    """Serve `device` to other programs over RPC until `until` is cancelled.

    The worker has ended when this returns or raises.

    `port`, `host`: TCP port and local address on which the worker listens.
    `device`: id of the device to serve.
    `cap_bytes`: memory cap of the worker, None for no cap.
    `kept`: cache of weights, so that a client sends them only once; None for no cache.
    `on_serving`: called when the worker accepts connections.

    Raises:
        EngineError: if the device cannot be served (port in use, unknown device), or if the worker ended by itself.
    """
    request = Serve(host=host, port=port, device=device, cap_bytes=cap_bytes)
    if kept is not None:
        folder = make_folder(kept.folder / str(port))
        request = replace(request, weight_cache=str(folder), cache_quota_bytes=kept.quota_bytes)
    child = ServingChild(request)
    until = until or CancelToken()
    child.start()
    try:
        serving = child.wait_until_serving(time.monotonic() + START_TIMEOUT_S)
        if on_serving is not None:
            on_serving(serving)
        # Polled, since the end of the process and `until` cannot be waited for together.
        while not until.wait(_UNTIL_POLL_S):
            outcome = child.wait_for_end(0)
            if outcome is not None:
                raise outcome.error()
    finally:
        child.begin_stop()
        child.wait_for_end(_END_TIMEOUT_S)


def numa_rig(
    nodes: Sequence[NumaNode],
    *,
    on_worker_ended: Callable[[str, str], None] | None = None,
) -> LabRig:
    """Return a lab rig, not yet started, with a worker bound to each NUMA node that has processors and memory.

    Each worker may use the free memory of its node, less a share for layers on the CPU and for other programs.

    `on_worker_ended`: called with a device id and a sentence if a worker ends by itself.

    Raises:
        ArgumentError: if fewer than two nodes have processors and memory.
    """
    serving = serving_nodes(nodes)
    if not serving:
        raise ArgumentError(numa_sentence(nodes))
    caps_bytes = [_node_bytes(node) for node in serving]
    return LabRig(caps_bytes, nodes=serving, on_worker_ended=on_worker_ended)


def memory_not_bound(names: Sequence[str]) -> str:
    """Return a sentence that the memory of the workers `names` is not bound to NUMA nodes; empty without workers."""
    if not names:
        return ""
    return tr(
        "The system does not bind the memory of {names} to its NUMA node (a container may forbid this). Only the "
        "processors are bound, so memory may come from another node.",
        names=", ".join(names),
    )


def _node_bytes(node: NumaNode) -> int:
    free_bytes = node.total_bytes if node.free_bytes is None else node.free_bytes
    return max(MIN_CAP_BYTES, free_bytes - free_bytes // NODE_MARGIN_SHARE)


def _lab_device(index: int, node: NumaNode | None, port: int, cap_bytes: int) -> Device:
    if node is None:
        device_id, name = f"RPC{index}", tr("simulated device {index}", index=index)
    else:
        device_id = f"NODE{node.number}"
        name = tr("NUMA node {number}, CPUs {processors}", number=node.number, processors=numbers_text(node.processors))
    return Device(
        id=device_id,
        name=name,
        backend="RPC",
        kind="gpu",
        total_bytes=cap_bytes,
        free_bytes=cap_bytes,
        endpoint=f"{_LOCAL_HOST}:{port}",
        # A cap on a simulated device stands for memory of its own; a node's memory is the host's.
        unified=node is not None,
    )

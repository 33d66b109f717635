"""Sixteen simulated machines with four devices each: times of layouts, network, weights, discovery and editor.

    python -m benchmarks.many_machines [--machines 16] [--delay-ms 0,1,20,100] [--mbit 1000]
        [--parts layouts,network,weights,discovery,editor]

The RPC workers are simulated, and answer only ggml's hello. Listeners, pairing and tunnels with their child processes
are real. A relay in front of each machine delays both directions by `--delay-ms`, and limits the rate.

`layouts`: seconds of the thread's processor time of each strategy, for Llama 3.1 405B on 64 devices. Goal: 2 each,
otherwise the exit code is 1.
`network`: wall-clock seconds for pairing, offers, tunnels and hellos, and the processor seconds that they need here and
in the tunnels' children.
`weights`: seconds for sending weights in several orders (`benchmarks._weights_order`).
`discovery`: wall-clock seconds until the search lists all machines.
`editor`: wall-clock milliseconds of the forecast, and processor milliseconds for showing 64 lanes and for a step of a
drag.

The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import os
import queue
import socket
import statistics
import struct
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import psutil

from benchmarks._weights_order import measure_weights
from engine.base.units import GIB, MIB
from engine.devices.device import Device, Rig, make_host, with_free_ids
from engine.devices.endpoint import greet_all
from engine.machines.rigs.remote_machines import LendingMachine, RemoteMachines, device_of
from engine.machines.tunnel.local_network import Announcement
from engine.machines.tunnel.offers import OfferedDevice, OfferedSpeed
from engine.machines.tunnel.pairings import Pairing
from engine.machines.tunnel.tunnels import NearbySearch, Tunnels
from engine.planning.fit.strategies.catalogue import STRATEGIES, find_strategy
from engine.planning.fit.strategies.constraints import Constraints, SearchLimit
from engine.planning.memory.model_memory import ModelMemory
from engine.planning.plan.edit import Edit
from engine.planning.plan.plan import Plan
from engine.planning.plan.preview import PreviewCache, make_preview
from engine.planning.settings.context_settings import ContextSettings
from engine.planning.speed.speeds import Link, Speeds
from engine.runtime.protocol.network import NearbyMachine
from tests.support.faulty_relay import Relay
from tests.support.rpc_peers import ANSWER, FACTS, HELLO_BYTES, answer_questions, receive
from tests.support.truth import truth_model
from tests.support.tunnels import Attic, Home, attic

NAMES = ("CUDA0", "CUDA1", "CUDA2", "CPU")
SIZES_GIB = (48, 24, 24, 16)
CONTEXT = ContextSettings(n_ctx=8192)
MODEL = "llama-3.1-405b"
GOAL_S = 2.0
WINDOW_EVERY_S = 10.0
"""Seconds between two requests of the window to each machine (`app/rig/known_machines.py`)."""
ROUNDS = 5


@contextmanager
def workers(count: int) -> Iterator[list[int]]:
    """Yield the ports of `count` simulated RPC workers, which answer hellos. Each serves one client at a time."""
    listening = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    facts = {**FACTS, 11: struct.pack("<QQ", 16 * GIB, 16 * GIB)}

    def serve(server: socket.socket) -> None:
        with suppress(OSError):
            while True:
                client, _ = server.accept()
                with client, suppress(OSError):
                    receive(client, HELLO_BYTES)
                    client.sendall(ANSWER)
                    answer_questions(client, facts)

    for server in listening:
        threading.Thread(target=serve, args=(server,), daemon=True).start()
    try:
        yield [server.getsockname()[1] for server in listening]
    finally:
        for server in listening:
            with suppress(OSError):
                server.shutdown(socket.SHUT_RDWR)
            server.close()


def reach(port: int) -> socket.socket:
    """Return a connection to the simulated worker at `port`."""
    return socket.create_connection(("127.0.0.1", port))


def offered(name: str, machine: int) -> OfferedDevice:
    """Return the offer of a device. Its speed falls with the number of its machine."""
    size_bytes = SIZES_GIB[NAMES.index(name)] * GIB
    rate = (0.9e12, 0.6e12, 0.5e12, 0.05e12)[NAMES.index(name)] * (1 - machine / 40)
    return OfferedDevice(
        name=name,
        kind="cpu" if name == "CPU" else "gpu",
        total_bytes=size_bytes,
        free_bytes=size_bytes,
        description=f"device {name}",
        backend="CPU" if name == "CPU" else "CUDA",
        alignment_bytes=128,
        overhead_bytes=300 * MIB,
        speed=OfferedSpeed(read_bytes_per_second=rate, by_type={"Q4_K": rate * 0.7}, op_s=4e-6),
    )


def simulated_rig(n_machines: int) -> tuple[Rig, Speeds]:
    """Return the rig with the devices of all machines, and their speeds. Every fourth machine has a slow link."""
    devices: list[Device] = []
    links: dict[str, Link] = {}
    for number in range(n_machines):
        machine = LendingMachine(f"192.0.2.{number + 1}:50052", f"{number:02x}" * 32, f"m{number:02}")
        for name in NAMES:
            device = device_of(offered(name, number), machine)
            devices.append(device)
            links[device.id] = Link(20e-3, 12.5e6) if number % 4 == 3 else Link(0.2e-3, 1.2e9)
    rig = Rig(with_free_ids(devices, ["CPU"]), make_host("host", 64 * GIB, 64 * GIB))
    told = {device.id: device.remote for device in rig.devices if device.remote is not None}
    bandwidths = {name: facts.read_bytes_per_second or 0.0 for name, facts in told.items()}
    return rig, Speeds(bandwidths, links, by_type={name: dict(facts.by_type) for name, facts in told.items()})


def measure_layouts(n_machines: int) -> dict[str, Any]:
    """Return processor seconds, tried layouts and used devices of each strategy."""
    rig, speeds = simulated_rig(n_machines)
    found: dict[str, Any] = {}
    for strategy in STRATEGIES:
        memory, watch = ModelMemory(truth_model(MODEL)), SearchLimit()
        begun_s = time.thread_time()
        result = find_strategy(strategy)(memory, rig, CONTEXT, Constraints(watch=watch, speeds=speeds))
        seconds = time.thread_time() - begun_s
        machines = {run.device.partition("-")[0] for run in result.layout.runs}
        slow = sorted(name for name in machines if int(name[1:]) % 4 == 3) if result.fits else []
        found[strategy] = {
            "seconds": round(seconds, 2),
            "tried": watch.n_tried,
            "fits": result.fits,
            "devices": len(result.layout.runs),
            "machines": len(machines),
            "slow_machines": len(slow),
        }
        print(f"  {strategy:14} {found[strategy]}", flush=True)
    return found


class Simulation:
    """Lending machines with a relay in front of each, and this computer, which is paired with all of them."""

    def __init__(self, folder: Path, n_machines: int, stack: ExitStack, *, delay_s: float, rate: float) -> None:
        ports = stack.enter_context(workers(n_machines * len(NAMES)))
        self.laptop = Home(folder / "laptop")
        self.machines: list[LendingMachine] = []
        pairings: list[Pairing] = []
        for number in range(n_machines):
            mine = ports[number * len(NAMES) : (number + 1) * len(NAMES)]
            callers = {name: partial(reach, port) for name, port in zip(NAMES, mine, strict=True)}
            served: Attic = stack.enter_context(attic(folder / f"m{number}", callers))
            relay = stack.enter_context(Relay(served.listener.port, delay_s=delay_s, bytes_per_second=rate))
            pairing = served.pair(self.laptop)
            pairings.append(pairing)
            self.machines.append(LendingMachine(relay.endpoint, pairing.fingerprint, f"m{number:02}"))
        self.tunnels = stack.enter_context(Tunnels(self.laptop.folder / "identity.pem", self.laptop.book))
        self.remote = RemoteMachines(
            self.laptop.folder / "identity.pem", self.laptop.book, self.tunnels, folder / "checks.json"
        )

    def ask_all(self) -> list[tuple[float, float]]:
        """Ask all machines in parallel what they lend, each in a thread, as the window does.

        Return (wall-clock seconds, processor seconds) of each request.
        """

        def one(machine: LendingMachine) -> tuple[float, float]:
            begun_s, used_s = time.monotonic(), time.thread_time()
            self.remote.ask(machine, 10.0)
            return time.monotonic() - begun_s, time.thread_time() - used_s

        with ThreadPoolExecutor(len(self.machines)) as pool:
            return list(pool.map(one, self.machines))


def timed(act: Callable[[], Any]) -> tuple[Any, float, float]:
    """Call `act`; return its result, its wall-clock seconds, and the processor seconds of this thread."""
    begun_s, used_s = time.monotonic(), time.thread_time()
    found = act()
    return found, time.monotonic() - begun_s, time.thread_time() - used_s


def children_s() -> tuple[float, float, int]:
    """Return processor seconds, resident MiB and the number of the tunnels' processes."""
    used, resident, count = 0.0, 0.0, 0
    for each in psutil.Process().children():
        with suppress(psutil.Error):
            if "engine.machines.tunnel" in each.cmdline():
                times = each.cpu_times()
                used += times.user + times.system
                resident += each.memory_info().rss / MIB
                count += 1
    return used, resident, count


def measure_network(n_machines: int, delay_s: float, rate: float) -> dict[str, Any]:
    """Return the times of pairing, offers, tunnels and hellos, with one delay of the relays."""
    with tempfile.TemporaryDirectory() as name, ExitStack() as stack:
        made, pairing_s, _ = timed(lambda: Simulation(Path(name), n_machines, stack, delay_s=delay_s, rate=rate))
        _, first_s, _ = timed(made.ask_all)
        cycles = [made.ask_all() for _ in range(ROUNDS)]
        cpu_s = statistics.median(sum(used_s for _, used_s in cycle) for cycle in cycles)
        waits_s = [wait_s for cycle in cycles for wait_s, _ in cycle]
        hosts = make_host("host", 64 * GIB)
        devices = [device_of(offered(name, 0), machine) for machine in made.machines for name in NAMES]
        rig, open_s, _ = timed(lambda: made.tunnels.reach(Rig(tuple(devices), hosts)))
        routes = {device.endpoint or "": device.via or "" for device in rig.devices}
        before_s, _, _ = children_s()
        greetings, greet_s, greet_cpu_s = timed(lambda: greet_all(list(routes), 10.0, routes=routes))
        after_s, resident, count = children_s()
        return {
            "delay_ms": delay_s * 1e3,
            "pairing_s": round(pairing_s, 2),
            "offers_s": round(first_s, 2),
            "offer_latency_s": round(statistics.median(waits_s), 3),
            "offer_worst_s": round(max(waits_s), 3),
            "telemetry_cpu_s": round(cpu_s, 3),
            "telemetry_cpu_percent": round(100 * cpu_s / WINDOW_EVERY_S, 1),
            "tunnels_open_s": round(open_s, 2),
            "tunnel_processes": count,
            "tunnel_mib": round(resident),
            "hello_s": round(greet_s, 2),
            "hello_cpu_s": round(greet_cpu_s, 2),
            "hello_tunnel_cpu_s": round(after_s - before_s, 2),
            "hellos_ok": sum(each.ok for each in greetings.values()),
        }


def measure_discovery(n_machines: int) -> dict[str, Any]:
    """Return the seconds until the search lists all machines, and counts of right names, devices and endpoints.

    The machines announce themselves at addresses of the loopback interface; every fourth one is called "attic".
    """
    names = ["attic" if number % 4 == 0 else f"m{number:02}" for number in range(n_machines)]
    fingerprints = [f"{number:02x}" * 32 for number in range(n_machines)]
    wanted = dict(zip(fingerprints, names, strict=True))
    told: queue.SimpleQueue[tuple[NearbyMachine, ...]] = queue.SimpleQueue()
    with ExitStack() as stack:

        def announce(number: int) -> None:
            announcement = Announcement(
                names[number],
                f"127.0.0.{number + 2}",
                50052,
                device=", ".join(NAMES),
                total_bytes=sum(SIZES_GIB) * GIB,
                fingerprint=fingerprints[number],
            )
            stack.enter_context(announcement)

        begun_s = time.monotonic()
        with ThreadPoolExecutor(n_machines) as pool:
            list(pool.map(announce, range(n_machines)))
        announced_s = time.monotonic() - begun_s
        search = NearbySearch(told.put, print, interfaces=("127.0.0.1",))
        stack.callback(search.close)
        begun_s = time.monotonic()
        search.start()
        told.get()
        ready_s, found = time.monotonic() - begun_s, dict[str, NearbyMachine]()
        with suppress(queue.Empty):
            while len(found) < n_machines:
                found = {each.fingerprint: each for each in told.get(timeout=20.0) if each.fingerprint in wanted}
    return {
        "announced_s": round(announced_s, 2),
        "search_ready_s": round(ready_s, 2),
        "all_listed_s": round(time.monotonic() - begun_s, 2) if len(found) == n_machines else None,
        "listed": len(found),
        "right_names": sum(each.name == wanted[each.fingerprint] for each in found.values()),
        "with_all_devices": sum(each.device == ", ".join(NAMES) for each in found.values()),
        "called_attic": sum(each.name == "attic" for each in found.values()),
        "endpoints": len({each.endpoint for each in found.values()}),
    }


def measure_editor(n_machines: int) -> dict[str, Any]:
    """Return times of the editor with all lanes, in milliseconds: forecast, first show and a step of a drag."""
    os.environ.setdefault("QT_QPA_PLATFORM", "offscreen")
    from PySide6.QtWidgets import QApplication

    from widgets.layout_editor.editor import LayoutEditor

    application = QApplication.instance() or QApplication([])
    rig, speeds = simulated_rig(n_machines)
    memory = ModelMemory(truth_model(MODEL))
    layout = find_strategy("proportional")(memory, rig, CONTEXT, Constraints(speeds=speeds)).layout
    tables = PreviewCache(memory)
    editor = LayoutEditor()
    editor.resize(1280, 800)
    editor.show()
    found: dict[str, Any] = {}
    preview, _, plan_s = timed(lambda: make_preview(tables, Plan(memory, rig, Edit(layout, CONTEXT))))

    def show(geometry: Any) -> None:
        editor.set_preview(geometry)
        editor.view.viewport().repaint()
        application.processEvents()

    _, _, show_s = timed(lambda: show(preview))
    steps = []
    for count in range(1, 21):
        moved = layout.move_boundary(len(layout.runs) // 2, layout.runs[len(layout.runs) // 2].first + (-1) ** count)
        later = make_preview(tables, Plan(memory, rig, Edit(moved, CONTEXT)))
        steps.append(timed(partial(show, later))[2])
    assert editor.preview_geometry is not None
    found["lanes"] = len(editor.preview_geometry.contents)
    found["forecast_ms"] = round(plan_s * 1e3, 1)
    found["show_ms"] = round(show_s * 1e3, 1)
    found["step_ms"] = round(statistics.median(steps) * 1e3, 1)
    editor.close()
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and print. Return 1 if a strategy takes longer than its goal."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.many_machines")
    parser.add_argument("--machines", type=int, default=16)
    parser.add_argument("--delay-ms", default="0,1,20,100", help="delays of each direction of the relays")
    parser.add_argument("--mbit", type=float, default=1000.0, help="rate of each direction of a connection")
    parser.add_argument("--parts", default="layouts,network,weights,discovery,editor")
    options = parser.parse_args(arguments)
    result: dict[str, Any] = {"benchmark": "many_machines", "machines": options.machines}
    parts = options.parts.split(",")
    if "layouts" in parts:
        result["layouts"] = measure_layouts(options.machines)
    if "network" in parts:
        result["network"] = []
        for delay_ms in map(float, options.delay_ms.split(",")):
            found = measure_network(options.machines, delay_ms / 1e3, options.mbit * 1e6 / 8)
            print(f"  {found}", flush=True)
            result["network"].append(found)
    if "weights" in parts:
        result["weights"] = measure_weights()
    if "discovery" in parts:
        result["discovery"] = measure_discovery(options.machines)
        print(f"  discovery {result['discovery']}", flush=True)
    if "editor" in parts:
        result["editor"] = measure_editor(options.machines)
        print(f"  editor {result['editor']}", flush=True)
    print(json.dumps(result))
    return int(any(each["seconds"] > GOAL_S for each in result.get("layouts", {}).values()))


if __name__ == "__main__":
    raise SystemExit(main())

"""Part of `many_machines`: in which order weights should be sent to many workers, computed and measured.

The computation shares the sender's link evenly among the running transfers (max-min fairness). No transfer is faster
than the link of its worker. Hashing and disks are not included. 64 workers are 16 machines with four devices each;
llama.cpp itself uses at most 15 of them for one model.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from msgspec import Struct

from engine.base.units import GIB
from engine.devices.device import Rig
from engine.machines.rigs.discovery import host_device
from engine.machines.rigs.lab import ServingChild
from engine.model.gguf.reader import read_model
from engine.planning.layout.layout import split_evenly
from engine.planning.memory.model_memory import ModelMemory
from engine.planning.settings.context_settings import ContextSettings
from engine.runtime import plan_requests
from engine.runtime.protocol.requests import Serve
from engine.runtime.session.events import Loaded
from tests.support.faulty_relay import Relay
from tests.support.load_specs import spec_of, worker_device
from tests.support.models import write_tiny_llama
from tests.support.session_log import SessionLog

MBIT = 1e6 / 8
N_REAL = 8
REAL_RATES = (100 * MBIT,) * 6 + (25 * MBIT,) * 2
START_S = 120.0


class Transfer(Struct, frozen=True):
    """The weights for one worker: their size, and the rate of the worker's link in bytes per second."""

    size_bytes: float
    rate: float


def fair_rates(transfers: Sequence[Transfer], own_rate: float) -> list[float]:
    """Return the rate of each transfer, in bytes per second, if all share the sender's link evenly.

    `own_rate`: bytes per second of the sender's link.
    """
    rates, left = [0.0] * len(transfers), own_rate
    by_rate = sorted(range(len(transfers)), key=lambda index: transfers[index].rate)
    for place, index in enumerate(by_rate):
        rates[index] = min(transfers[index].rate, left / (len(transfers) - place))
        left -= rates[index]
    return rates


def seconds_of(transfers: Sequence[Transfer], own_rate: float, at_once: int) -> float:
    """Return the seconds until all transfers have ended, started in the given order.

    `at_once`: the number of transfers that run in parallel.
    """
    waiting, running, now_s = list(transfers), list[tuple[Transfer, float]](), 0.0
    while waiting or running:
        while waiting and len(running) < at_once:
            each = waiting.pop(0)
            running.append((each, each.size_bytes))
        rates = fair_rates([each for each, _ in running], own_rate)
        step_s = min(left / rate for (_, left), rate in zip(running, rates, strict=True))
        now_s += step_s
        after = [(each, left - rate * step_s) for (each, left), rate in zip(running, rates, strict=True)]
        running = [(each, left) for each, left in after if left > 1.0]
    return now_s


def simulate_orders(n_workers: int, n_slow: int, *, own_rate: float, weights_bytes: float) -> dict[str, float]:
    """Return the computed seconds of several orders of the same transfers, by the name of the order.

    Each worker gets an equal part of the weights. Its link has 1000 Mbit/s; `n_slow` workers have links with 100
    Mbit/s.
    """
    part = weights_bytes / n_workers
    fast, slow = Transfer(part, 1000 * MBIT), Transfer(part, 100 * MBIT)
    last = [fast] * (n_workers - n_slow) + [slow] * n_slow
    specs = {
        "one_by_one": (last, 1),
        "4_at_once_slow_last": (last, 4),
        "4_at_once_slow_first": (last[::-1], 4),
        "16_at_once_slow_last": (last, 16),
        "16_at_once_slow_first": (last[::-1], 16),
        "all_at_once": (last, n_workers),
    }
    return {name: round(seconds_of(spec, own_rate, at_once), 1) for name, (spec, at_once) in specs.items()}


def measure_real(folder: Path) -> dict[str, Any]:
    """Return the seconds of real loads on workers behind relays with limited rates, by the order of the transfers.

    llama.cpp's own order sends one tensor after another, with the slow links first or last. The third load sends early
    weights to all workers in parallel. `send`, `read`: seconds of these stages of the load.
    """
    path = write_tiny_llama(folder / "m.gguf", n_layers=N_REAL, n_embd=1024, n_head=8, n_ff=6144, n_vocab=2048)
    memory, found = ModelMemory(read_model(path)), dict[str, Any]()
    usual = plan_requests.EARLY_LEAST_BYTES
    specs = {"one_by_one_slow_last": (False, REAL_RATES), "one_by_one_slow_first": (False, REAL_RATES[::-1]),
              "all_at_once": (True, REAL_RATES)}  # fmt: skip
    for name, (is_early, rates) in specs.items():
        with ExitStack() as stack:
            devices = []
            for number, rate in enumerate(rates):
                kept = folder / f"{name}-{number}"
                kept.mkdir()
                serve = Serve(host="127.0.0.1", port=0, n_threads=1, weight_cache=str(kept), cache_quota_bytes=GIB)
                child = ServingChild(serve)
                child.start()
                stack.callback(child.wait_for_end, START_S)
                stack.callback(child.begin_stop)
                port = child.wait_until_serving(time.monotonic() + START_S).port
                relay = stack.enter_context(Relay(port, bytes_per_second=rate))
                devices.append(worker_device(f"RPC{number}", relay.endpoint, GIB))
            layout = split_evenly(N_REAL, [device.id for device in devices])
            plan_requests.EARLY_LEAST_BYTES = 0 if is_early else 1 << 60
            try:
                with SessionLog() as log:
                    rig = Rig(tuple(devices), host_device())
                    log.session.load(spec_of(memory, rig, layout, ContextSettings(n_ctx=256, threads=1)))
                    ending = log.wait_for_endings(1)[0]
            finally:
                plan_requests.EARLY_LEAST_BYTES = usual
        assert isinstance(ending, Loaded), ending
        found[name] = {stage: round(ending.seconds.get(stage, 0.0), 1) for stage in ("send", "read")}
        print(f"  weights, {N_REAL} real workers, {name}: {found[name]}", flush=True)
    return found


def measure_weights() -> dict[str, Any]:
    """Return computed seconds for 64 workers, by rate of the sender's link, and the seconds of the real loads."""
    found: dict[str, Any] = {}
    for own_gbit in (1, 10, 100):
        for n_slow in (0, 4, 16):
            seconds = simulate_orders(64, n_slow, own_rate=own_gbit * 1000 * MBIT, weights_bytes=230e9)
            found[f"64 workers, {n_slow} slow, own link {own_gbit} Gbit/s"] = seconds
            print(f"  weights, 64 workers by arithmetic, {n_slow:2} slow, {own_gbit:3} Gbit/s: {seconds}", flush=True)
    with tempfile.TemporaryDirectory() as name:
        found["real"] = measure_real(Path(name))
    return found

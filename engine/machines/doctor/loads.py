"""Loads a model on one device, and compares the measured memory with the forecast and with the device's free memory."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

from engine.base.cancellation import CancelToken
from engine.base.units import format_bytes
from engine.devices.device import Device, Rig
from engine.machines.doctor.report import Check, Figure
from engine.machines.rigs.discovery import host_device, list_local_devices
from engine.model.gguf.reader import read_model
from engine.planning.fit.calibration import NO_CALIBRATION, Calibration
from engine.planning.layout.layout import single_device
from engine.planning.memory.model_memory import ModelMemory
from engine.planning.plan.decisions.context_length import default_context
from engine.planning.plan.edit import Edit
from engine.planning.plan.plan import Plan
from engine.planning.plan.report import DeviceRow
from engine.runtime.plan_requests import environment, load_request
from engine.runtime.process.blocking_child import BlockingChild
from engine.runtime.protocol.messages import AllocationFailure, DeviceMemoryReadings, Generated, LoadReply
from engine.runtime.protocol.requests import DeviceMemoryQuery, Generate
from engine.runtime.session.reports import loaded_event

PARTS = ("weights_bytes", "mapped_bytes", "kv_cache_bytes", "recurrent_bytes", "compute_bytes", "output_bytes")
N_CTX = 2048
TOLERATED = 0.01
"""Largest error of a forecast with which the check passes, as a share of the forecast memory.

Smaller errors are reported too.
"""
LOAD_TIMEOUT_S = 300.0
_PROMPT = "What does a computer's memory do?"
_TOKENS = 24


class LoadCheck:
    """Loads a model on one device after another, and compares the measured memory with the forecast.

    `calibration`: memory overheads of the devices. The caller may set it before a load; a load on a card updates it.
    """

    def __init__(self, rig: Rig, model: Path, cancel: CancelToken) -> None:
        self._rig = rig
        self._memory = ModelMemory(read_model(model))
        self._cancel = cancel
        self.calibration = NO_CALIBRATION
        self.learn: Callable[[Calibration], Calibration] | None = None
        """Adds what the last load showed to a calibration; None before the first load that showed something."""

    def on(self, device: Device) -> Iterable[Check]:
        """Load all layers of the model on `device`, let the model answer a prompt, and yield a check for each result.

        The checks are of the memory, the answer and, on a card, the memory overhead.

        Raises:
            EngineError: if the load fails for a reason other than lack of memory, or is cancelled.
        """
        # Read before the child starts: its CUDA context takes device memory that is part of the overhead.
        plan = self._plan(device)
        before = self._free_bytes(device)
        with BlockingChild(
            timeout_s=LOAD_TIMEOUT_S,
            cancel=self._cancel,
            name="load check",
            environment=environment(plan),
        ) as child:
            answer = child.ask(load_request(plan), LoadReply)
            if isinstance(answer, AllocationFailure):
                yield Check(
                    name="load",
                    device=device.id,
                    ok=plan.report.fits is False,
                    detail=f"out of memory: {format_bytes(answer.requested_bytes)} requested on {answer.device}, "
                    f"{'as' if not plan.report.fits else 'not as'} it was forecast",
                    figures={"requested_bytes": answer.requested_bytes, "free_before_bytes": before},
                )
                return
            loaded = loaded_event(plan, answer)
            spoken = child.ask(Generate(id=1, prompt=_PROMPT, max_tokens=_TOKENS, temperature=0.0), Generated)
            readings = child.ask(DeviceMemoryQuery(), DeviceMemoryReadings).readings
            during = {each.device: each.free_bytes for each in readings}.get(device.id)
            # The child reports its CPU backend's memory, which is the machine's without control groups.
            if device.is_host:
                during = host_device().free_bytes
        after = self._free_bytes(device)
        free = {"free_before_bytes": before, "free_during_bytes": during, "free_after_bytes": after}
        forecast = {row.id: row for row in plan.forecast}
        # A load on a card also takes host memory, as for token embeddings and the output buffer.
        for row in loaded.devices:
            if row.need_bytes or row.mapped_bytes or row.id == device.id:
                yield _forecast_check(device, row, forecast[row.id])
        yield _load_check(device, free, spoken)
        # A worker reports the memory of its whole machine, and the host has no context: neither has an overhead to
        # learn.
        if not device.is_rpc and not device.is_host and before is not None and during is not None:
            yield self._overhead_check(device, plan, loaded.devices, before - during)

    def _plan(self, device: Device) -> Plan:
        model = self._memory.model
        context = default_context(model, N_CTX)
        return Plan(self._memory, self._rig, Edit(single_device(model.n_layers, device.id), context))

    def _free_bytes(self, device: Device) -> int | None:
        """Return the present free bytes of the host as the system reports them, or of a card as the engine does.

        None if the engine does not list the device. Also None for an RPC worker, because it reports the memory of its
        whole machine.
        """
        if device.is_host:
            return host_device().free_bytes
        if device.is_rpc:
            return None
        found = list_local_devices(cancel=self._cancel)
        return next((each.free_bytes for each in found if each.name == device.id), None)

    def _overhead_check(self, device: Device, plan: Plan, rows: tuple[DeviceRow, ...], grown_bytes: int) -> Check:
        known = [row for row in rows if row.id == device.id]
        self.learn = lambda stored: stored.with_load(self._rig, plan.forecast, known, {device.id: grown_bytes})
        self.calibration = self.learn(self.calibration)
        overhead_bytes = self.calibration.overhead_bytes(device)
        taken_bytes = sum(row.buffer_bytes for row in known)
        return Check(
            name="overhead",
            device=device.id,
            ok=None if overhead_bytes is None else True,
            detail="no difference to remember" if overhead_bytes is None else f"{format_bytes(overhead_bytes)}, kept",
            figures={"grown_bytes": grown_bytes, "measured_bytes": taken_bytes, "overhead_bytes": overhead_bytes},
        )


def _forecast_check(device: Device, measured: DeviceRow, forecast: DeviceRow) -> Check:
    """Return a check that compares each part of a device's memory, such as weights or KV cache, with the forecast.

    Overhead, the memory beyond llama.cpp's buffers, is left out, because the engine does not report it.
    """
    figures: dict[str, Figure] = {"row": measured.id}
    off, size_bytes = [], 0
    for part in PARTS:
        measured_bytes, expected = getattr(measured, part), getattr(forecast, part)
        name = part.removesuffix("_bytes")
        figures |= {f"{name}_measured_bytes": measured_bytes, f"{name}_forecast_bytes": expected}
        size_bytes += expected
        if measured_bytes != expected:
            off.append((name, measured_bytes - expected))
    where = "" if measured.id == device.id else f"on {measured.id}: "
    words = ", ".join(f"{name.replace('_', ' ')} {'+' if by > 0 else '-'}{format_bytes(abs(by))}" for name, by in off)
    return Check(
        name="forecast",
        device=device.id,
        # Absolute values: a part that is too large must not hide one that is too small.
        ok=sum(abs(by) for _, by in off) <= size_bytes * TOLERATED,
        detail=f"{where}{words or f'exact, {format_bytes(size_bytes)}'}",
        figures=figures,
    )


def _load_check(device: Device, free: Mapping[str, int | None], spoken: Generated) -> Check:
    speed = spoken.generated_tokens / spoken.generation_seconds if spoken.generation_seconds > 0 else None
    words = [
        f"{name.split('_')[1]} {format_bytes(size_bytes)}"
        for name, size_bytes in free.items()
        if size_bytes is not None
    ]
    free_text = f"; free memory {', '.join(words)}" if words else ""
    return Check(
        name="load",
        device=device.id,
        detail=f"loads and answers{'' if speed is None else f' ({speed:.3g} tok/s)'}{free_text}",
        figures={**free, "tokens_per_second": speed, "generated_tokens": spoken.generated_tokens},
    )

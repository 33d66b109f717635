"""Builders of `Preview` values for widget tests: plausible models and rigs, without an engine."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from engine.base.units import GIB, MIB
from engine.base.values import replace
from engine.devices.device import CPU_ID, Device, Rig, make_host
from engine.planning.layout.layout import Layout, Override, Run, Violation
from engine.planning.memory.estimate import DeviceMemory, Grade
from engine.planning.plan.edit import Edit
from engine.planning.plan.preview import LayerBytes, LoadedLayout, Preview
from engine.planning.plan.report import DeviceRow, FitReport, make_row
from engine.planning.settings.context_settings import ContextSettings


def make_gpu(device_id: str, total_gib: float, *, name: str = "RTX 3090", used_gib: float = 0.4) -> Device:
    """Return a card on which other programs use `used_gib`."""
    total_bytes = int(total_gib * GIB)
    return Device(
        id=device_id,
        name=name,
        backend="CUDA",
        kind="gpu",
        total_bytes=total_bytes,
        free_bytes=total_bytes - int(used_gib * GIB),
        margin_bytes=512 * MIB,
    )


def make_rig(*devices: Device, host_gib: int = 64) -> Rig:
    """Return a rig with these devices, and a host with a third of its memory in use."""
    host = make_host("Ryzen 7, RAM", host_gib * GIB, host_gib * GIB * 2 // 3)
    return Rig(devices=devices, host=host)


def dense_layers(count: int, *, attention_mib: int = 40, ffn_mib: int = 90, kv_mib: int = 16) -> tuple[LayerBytes, ...]:
    """Return layers without experts."""
    return tuple(
        LayerBytes(index, attention_mib * MIB, ffn_mib * MIB, 0, MIB // 64, kv_mib * MIB) for index in range(count)
    )


def moe_layers(count: int, *, expert_mib: int = 300, kv_mib: int = 32) -> tuple[LayerBytes, ...]:
    """Return layers with experts. The first one is dense and small, as in many models."""
    first = LayerBytes(0, 20 * MIB, 60 * MIB, 0, MIB // 64, kv_mib * MIB)
    rest = (LayerBytes(i, 20 * MIB, 0, expert_mib * MIB, MIB // 64, kv_mib * MIB) for i in range(1, count))
    return (first, *rest)


def make_layout(n_layers: int, runs: Sequence[tuple[str, int]], **fields: object) -> Layout:
    """Return a layout of (device, number of layers) runs. By default the output layer follows the last run."""
    made: list[Run] = []
    for device, length in runs:
        first = made[-1].last + 1 if made else 0
        made.append(Run(device, first, first + length - 1))
    assert made[-1].last == n_layers - 1
    layout = Layout(n_layers=n_layers, runs=tuple(made), output_device=made[-1].device)
    return replace(layout, **fields)  # type: ignore[arg-type]


def rows_of(
    rig: Rig,
    layout: Layout,
    layers: Sequence[LayerBytes],
    *,
    output_bytes: int = 0,
    grade: Grade = Grade.ESTIMATED,
    extra_bytes: int = 0,
) -> tuple[DeviceRow, ...]:
    """Return the forecast row of each device: weights, KV cache, and compute buffers if it has weights.

    Overrides of experts are applied, others are not.
    """
    weights = dict.fromkeys(rig.ids, 0)
    kv = dict.fromkeys(rig.ids, 0)
    for run in layout.runs:
        for layer in layers[run.first : run.last + 1]:
            if run.device not in weights:
                continue
            experts = next((o.device for o in layout.overrides if _covers(o, layer.index)), run.device)
            weights[run.device] += layer.weights_bytes - layer.expert_bytes
            weights[experts] += layer.expert_bytes
            kv[run.device] += layer.kv_bytes
    if layout.output_device in weights:
        weights[layout.output_device] += output_bytes
    return tuple(
        make_row(
            device,
            DeviceMemory(
                weights_bytes=0 if device.is_host else weights[device.id],
                mapped_bytes=weights[device.id] if device.is_host else 0,
                kv_cache_bytes=kv[device.id],
                compute_bytes=300 * MIB + extra_bytes if weights[device.id] else 0,
            ),
            grade,
        )
        for device in rig.all_devices
    )


def _covers(override: Override, layer: int) -> bool:
    if override.part != "experts" or override.first is None or override.last is None:
        return False
    return override.first <= layer <= override.last


def make_preview(
    rig: Rig,
    layout: Layout,
    layers: tuple[LayerBytes, ...],
    *,
    name: str = "Test-8B",
    violations: tuple[Violation, ...] = (),
    probe_only: str | None = None,
    context: ContextSettings | None = None,
) -> Preview:
    """Return the preview of a model with these layers and this layout."""
    output_bytes = 400 * MIB
    return Preview(
        model_name=name,
        rig=rig,
        edit=Edit(layout, context or ContextSettings()),
        layers=layers,
        token_embedding_bytes=280 * MIB,
        output_weights_bytes=output_bytes,
        report=FitReport(rows_of(rig, layout, layers, output_bytes=output_bytes), violations, probe_only),
    )


def with_edit(preview: Preview, **changes: Any) -> Preview:
    """Return the preview with a changed edit and unchanged rows."""
    return replace(preview, edit=replace(preview.edit, **changes))


def with_layout(preview: Preview, layout: Layout) -> Preview:
    """Return the preview with another layout, and with rows for it."""
    rows = rows_of(preview.rig, layout, preview.layers, output_bytes=preview.output_weights_bytes)
    return replace(with_edit(preview, layout=layout), report=replace(preview.report, rows=rows))


def loaded_from(preview: Preview, *, extra_bytes: int = 24 * MIB) -> LoadedLayout:
    """Return the loaded layout of a preview. Each device holds `extra_bytes` more than was forecast."""
    measured = rows_of(
        preview.rig,
        preview.layout,
        preview.layers,
        output_bytes=preview.output_weights_bytes,
        grade=Grade.MEASURED,
        extra_bytes=extra_bytes,
    )
    return LoadedLayout(preview.edit, measured, preview.report.rows)


def dense_preview() -> Preview:
    """Return the preview of 32 layers on two cards and the host."""
    rig = make_rig(make_gpu("CUDA0", 4), make_gpu("CUDA1", 3, name="RTX 3060"), host_gib=32)
    return make_preview(rig, make_layout(32, [("CUDA0", 16), ("CUDA1", 10), (CPU_ID, 6)]), dense_layers(32))


def moe_preview() -> Preview:
    """Return the preview of 48 layers with experts, those of the last eight on the host, and an empty device."""
    rig = make_rig(
        make_gpu("CUDA0", 12), make_gpu("CUDA1", 6, name="RTX 3060"), make_gpu("RPC0", 8, name="attic", used_gib=0.1)
    )
    layout = make_layout(
        48,
        [("CUDA0", 29), ("CUDA1", 15), (CPU_ID, 4)],
        output_device="CUDA1",
        overrides=(Override(CPU_ID, part="experts", first=40, last=47),),
    )
    return make_preview(rig, layout, moe_layers(48), name="Test-30B-A3B")


def wide_preview() -> Preview:
    """Return the preview of 126 layers on eight devices."""
    cards = [make_gpu(f"CUDA{index}", 24 if index % 2 else 32, name=f"Card {index}") for index in range(7)]
    rig = make_rig(*cards, host_gib=256)
    runs = [(card.id, 16) for card in cards] + [(CPU_ID, 14)]
    layers = dense_layers(126, attention_mib=500, ffn_mib=1200, kv_mib=64)
    return make_preview(rig, make_layout(126, runs), layers, name="Test-405B")


def patchwork_preview() -> Preview:
    """Return the preview of 45 layers in 15 runs on three devices."""
    rig = make_rig(make_gpu("RPC0", 8, name="attic"), make_gpu("RPC1", 8, name="cellar"), host_gib=16)
    order = ["RPC0", CPU_ID, "RPC1"]
    return make_preview(rig, make_layout(45, [(order[i % 3], 3) for i in range(15)]), dense_layers(45))

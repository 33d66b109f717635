"""Which split modes a model can have on a rig, why not the others, and what choosing one makes of a layout."""

from __future__ import annotations

from itertools import pairwise

from engine.devices.device import CPU_ID, Device, Rig
from engine.gguf.model_file import ModelFile
from engine.language import tr, tr_count
from engine.layout.engine_parameters import MAX_DEVICES, leading_cpu_layers
from engine.layout.layout import Layout, Run, SplitMode
from engine.layout.tensor_rules import tensor_model_violations

_INSTEAD = tr("Choose Layer: any layer on any device.")


def split_mode_obstacles(rig: Rig, model: ModelFile | None = None) -> dict[SplitMode, str]:
    """Return, for each split mode that cannot be chosen on `rig`, a sentence on why and what to do instead."""
    found: dict[SplitMode, str | None] = {"tensor": _tensor_obstacle(rig, model), "row": _row_obstacle(rig)}
    return {mode: sentence for mode, sentence in found.items() if sentence is not None}


def layout_in_mode(layout: Layout, mode: SplitMode, rig: Rig) -> Layout:
    """Return `layout` in another split mode.

    Modes tensor and row go over every able device of the rig with shares by free memory. Leading CPU layers stay where
    they are; the runs of the other layers follow the shares, for the way back to mode layer.
    """
    if mode == layout.split_mode or mode in ("layer", "none"):
        return layout.with_split_mode(mode)
    members = [device for device in rig.devices if _able(device, mode)][:MAX_DEVICES]
    if not members:
        return layout.with_split_mode(mode)
    leading = leading_cpu_layers(layout)
    if leading == layout.n_layers:
        leading = 0
    weights = {device.id: max(0, device.available_bytes - device.margin_bytes) for device in members}
    if not any(weights.values()):
        weights = dict.fromkeys(weights, 1)
    shares = tuple((device, _percent(size, sum(weights.values()))) for device, size in weights.items())
    return with_shares(_with_runs(layout, leading, shares, mode), shares)


def with_shares(layout: Layout, shares: tuple[tuple[str, float], ...]) -> Layout:
    """Return a layout of mode tensor or row with other shares; its runs follow them."""
    return _with_runs(layout, leading_cpu_layers(layout), shares, layout.split_mode)


def split_shares(layout: Layout, rig: Rig) -> tuple[tuple[str, float], ...]:
    """Return the shares of the layout, then 0 for every other device that could be a member; empty in mode layer."""
    if layout.split_mode not in ("tensor", "row"):
        return ()
    named = {device for device, _ in layout.tensor_split}
    others = (device.id for device in rig.devices if device.id not in named and _able(device, layout.split_mode))
    return (*layout.tensor_split, *((device, 0.0) for device in others))


def _with_runs(layout: Layout, leading: int, shares: tuple[tuple[str, float], ...], mode: SplitMode) -> Layout:
    taking = [(device, share) for device, share in shares if share > 0]
    total = sum(share for _, share in taking)
    split_layers = layout.n_layers - leading
    bounds = [leading]
    reached = 0.0
    for _, share in taking:
        reached += share
        bounds.append(leading + round(split_layers * reached / total))
    front = (Run(CPU_ID, 0, leading - 1),) if leading else ()
    parts = zip(taking, pairwise(bounds), strict=True)
    runs = tuple(Run(device, first, stop - 1) for (device, _), (first, stop) in parts if stop > first)
    return Layout(
        n_layers=layout.n_layers,
        runs=(*front, *runs),
        output_device=runs[-1].device,
        split_mode=mode,
        tensor_split=shares,
        main_device=layout.main_device if mode == "row" else None,
        overrides=layout.overrides,
    )


def _percent(size: int, total: int) -> float:
    """Return a share that reads well, at least 1 of 100 where there is any memory at all."""
    return float(max(1, round(100 * size / total))) if size else 0.0


def _able(device: Device, mode: SplitMode) -> bool:
    return device.capabilities.row_split if mode == "row" else device.capabilities.tensor_split


def _tensor_obstacle(rig: Rig, model: ModelFile | None) -> str | None:
    if not rig.devices:
        return tr("Tensor split needs devices besides the CPU. Choose Layer.")
    if not any(_able(device, "tensor") for device in rig.devices):
        faults = (device.fault("tensor_split") for device in rig.devices)
        reason = next((f" {fault.reason}" for fault in faults if fault is not None), "")
        return tr(
            "None of the devices can be a member of a tensor split.{reason} {instead}", reason=reason, instead=_INSTEAD
        )
    refusal = next(tensor_model_violations(model), None) if model is not None else None
    return f"{refusal.message} {_INSTEAD}" if refusal is not None else None


def _row_obstacle(rig: Rig) -> str | None:
    if not rig.devices:
        return tr("Row split needs devices besides the CPU. Choose Layer.")
    unable = [device.id for device in rig.devices if not _able(device, "row")]
    if unable:
        return tr_count(
            "Row split needs split buffers, which {names} has not. {instead}",
            "Row split needs split buffers, which {names} have not. {instead}",
            len(unable),
            names=_join(unable),
            instead=_INSTEAD,
        )
    return None


def _join(names: list[str]) -> str:
    return names[0] if len(names) == 1 else tr("{names} and {names2}", names=", ".join(names[:-1]), names2=names[-1])

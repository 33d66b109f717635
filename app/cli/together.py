"""The `plan-together` command: finds layouts for several models that shall be loaded at the same time."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path

from app.cli import exit_codes
from app.cli.auto_options import with_margins
from app.cli.inputs import patience, this_machine
from app.cli.output import print_document, print_line
from app.paths import speeds_path
from engine.base.errors import ArgumentError
from engine.base.units import format_bytes
from engine.base.values import replace
from engine.devices.rig_file import read_rig
from engine.machines.rigs.speeds import known_speeds
from engine.model.gguf.model_file import ModelFile
from engine.model.gguf.reader import read_model
from engine.planning.fit.speed_book import read_speed_book
from engine.planning.fit.strategies.catalogue import find_strategy
from engine.planning.fit.strategies.constraints import Constraints, SearchLimit, check_constraints
from engine.planning.fit.together import (
    LeaveOut,
    PlannedModel,
    Together,
    Wanted,
    distinct_names,
    plan_together,
    together_sentence,
)
from engine.planning.layout.layout_file import free_name, layout_document, write_layout
from engine.planning.memory.model_memory import ModelMemory
from engine.planning.plan.decisions.context_length import default_context
from engine.planning.settings.context_settings import ContextSettings


def run_plan_together(options: Namespace) -> int:
    """Print a layout for each model, so that all models fit at the same time, and return the exit code."""
    find_strategy(options.auto)
    models = [read_model(path) for path in options.files]
    rig = read_rig(options.rig) if options.rig is not None else this_machine()
    rig = with_margins(options.tunnels.reach(rig), options.margin)
    constraints = Constraints(
        off=frozenset(device_id for ids in options.off for device_id in ids), watch=SearchLimit(on_tried=patience())
    )
    check_constraints(constraints, rig, max(model.n_layers for model in models))
    wanted = [
        Wanted(name, ModelMemory(model), _context(model, options.ctx))
        for name, model in zip(distinct_names(models), models, strict=True)
    ]
    speeds = known_speeds(rig, read_speed_book(speeds_path()))
    found = plan_together(wanted, rig, speeds, strategy=options.auto, constraints=constraints)
    if options.out is not None:
        _write_layouts(options.out, found)
    if options.json:
        print_document(_document(found, [each.name for each in wanted]))
    else:
        print_line(_text(found))
    return exit_codes.OK if found.fits else exit_codes.DOES_NOT_FIT


def _context(model: ModelFile, n_ctx: int | None) -> ContextSettings:
    context = default_context(model)
    return context if n_ctx is None else replace(context, n_ctx=min(n_ctx, model.n_ctx_train or n_ctx))


def _write_layouts(folder: Path, found: Together) -> None:
    """Write a layout file into `folder` for each model in `found`, named after the model."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ArgumentError(f"--out: the folder {folder} cannot be created ({error.strerror}); name another.") from None
    names: list[str] = []
    for each in found.placed:
        plan = each.plan
        # Two names may differ in the replaced character only.
        names.append(free_name(each.name.replace("/", "_"), names))
        write_layout(folder / f"{names[-1]}.layout.json", plan.edit.as_file(plan.model.name))


def _document(found: Together, names: Sequence[str]) -> dict[str, object]:
    return {
        "models": [_model_document(found.find(name)) for name in names],
        "order": [each.name for each in found.placed],
        "devices": [
            {
                "id": device.id,
                "need_bytes": found.need_bytes(device.id),
                "available_bytes": device.available_bytes,
                "margin_bytes": device.margin_bytes,
            }
            for device in found.rig.all_devices
        ],
        "fits": found.fits,
        "whole": found.is_whole,
        "sentence": together_sentence(found),
        "give_way": None if found.leave_out is None else _leave_out_document(found.leave_out),
    }


def _model_document(placed: PlannedModel) -> dict[str, object]:
    plan = placed.plan
    return {
        "name": placed.name,
        "file": str(plan.model.paths[0]),
        "layout": layout_document(plan.edit.as_file(plan.model.name)),
        "need_bytes": dict(placed.need_bytes),
        "layers_on_cpu": placed.n_host_layers,
        "fits": placed.fits,
        "whole": placed.is_whole,
    }


def _leave_out_document(leave_out: LeaveOut) -> dict[str, object]:
    return {
        "name": leave_out.name,
        "gains": [
            {
                "name": gain.name,
                "fits": [gain.before.fits, gain.after.fits],
                "layers_on_cpu": [gain.before.n_host_layers, gain.after.n_host_layers],
                "tokens_per_second": [
                    None if each.speed is None else each.speed.tokens_per_second for each in (gain.before, gain.after)
                ],
            }
            for gain in leave_out.gains
        ],
    }


def _text(found: Together) -> str:
    devices = [device for device in found.rig.all_devices if found.need_bytes(device.id)]
    lines = [("", *(device.id for device in devices))]
    for each in found.placed:
        lines.append((each.name, *(_size(each.need_bytes.get(device.id, 0)) for device in devices)))
    lines.append(("together", *(_size(found.need_bytes(device.id)) for device in devices)))
    lines.append(("available", *(_size(device.available_bytes) for device in devices)))
    widths = [max(len(line[column]) for line in lines) for column in range(len(devices) + 1)]
    table = [
        "  ".join(
            cell.rjust(width) if column else cell.ljust(width)
            for column, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in lines
    ]
    runs = [
        f"{each.name}: " + ", ".join(f"{run.device} {run.length}" for run in each.plan.edit.layout.runs)
        for each in found.placed
    ]
    return "\n".join([*table, "", "Layers, in the order of loading:", *runs, "", together_sentence(found)])


def _size(size_bytes: int) -> str:
    return format_bytes(size_bytes) if size_bytes else "-"

"""What `plan` and `load` have in common: from arguments to model, rig, layout and context settings."""

from __future__ import annotations

import sys
import time
from argparse import Namespace
from collections.abc import Callable
from dataclasses import dataclass, replace

from app.cli.auto_options import check_auto_options, constraints_of, with_margins
from app.cli.machine import find_machine
from app.cli.settings_options import context_of, side_files_of
from app.paths import calibration_path, speeds_path
from engine.devices.device import Rig
from engine.devices.rig_file import read_rig
from engine.errors import ArgumentError
from engine.fit.calibration import read_calibration
from engine.fit.initial_layout import initial_layout
from engine.fit.speed_book import read_speed_book
from engine.fit.strategies.catalogue import auto_layout, find_strategy
from engine.fit.strategies.constraints import Watch
from engine.gguf.reader import read_model
from engine.layout.layout_file import read_layout
from engine.memory.model_memory import ModelMemory
from engine.plan.edit import Edit
from engine.plan.plan import Plan
from engine.rigs.speeds import known_speeds

_PATIENCE_S = 2.0


@dataclass(frozen=True, slots=True)
class Asked:
    """What a command line asks for; `explanation` is an automatic layout's."""

    plan: Plan
    explanation: str | None = None


def read_inputs(options: Namespace) -> Asked:
    """Read what `options` name; without a rig file discover this machine, without a layout make the initial one."""
    check_auto_options(options)
    if options.auto is not None:
        find_strategy(options.auto)
        if options.layout is not None:
            raise ArgumentError("--auto finds a layout and --layout gives one; leave one of them out.")
    model = read_model(options.file)
    rig = read_rig(options.rig) if options.rig is not None else None
    document = read_layout(options.layout, n_layers=model.n_layers) if options.layout is not None else None
    context = context_of(options, model, document.context if document is not None else None)
    rig = with_margins(options.tunnels.reach(rig or this_machine()), options.margin)
    side_files = side_files_of(options, model, rig)
    memory = ModelMemory(model)
    if document is not None:
        return Asked(Plan(memory, rig, Edit(document.layout, context, side_files)))
    if options.auto is None:
        layout = initial_layout(memory, rig, context, side_files)
        return Asked(Plan(memory, rig, Edit(layout, context, side_files)))
    speeds = known_speeds(rig, read_speed_book(speeds_path()))
    constraints = replace(
        constraints_of(options, rig, model.n_layers), side_files=side_files, speeds=speeds, watch=Watch(tell=patience())
    )
    found = auto_layout(options.auto, memory, rig, context, constraints)
    return Asked(Plan(memory, rig, Edit(found.layout, found.context, side_files)), found.explanation)


def patience() -> Callable[[int], None]:
    """Return what says every few seconds on standard error how far a search for a layout is, if people read that."""
    told = time.monotonic()

    def tell(n_tried: int) -> None:
        nonlocal told
        if time.monotonic() - told >= _PATIENCE_S and sys.stderr.isatty():
            told = time.monotonic()
            print(f"finding a layout: {n_tried} tried; Ctrl-C ends the search", file=sys.stderr, flush=True)

    return tell


def this_machine() -> Rig:
    """Return this machine's devices with what earlier loads and self-tests in the window have shown of them."""
    return read_calibration(calibration_path()).apply(find_machine())

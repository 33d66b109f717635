"""What `plan` and `load` have in common: from arguments to model, rig, layout and context settings."""

from __future__ import annotations

from argparse import Namespace
from dataclasses import dataclass

import msgspec

from app.cli.auto_options import check_auto_options, constraints_of, with_margins
from app.paths import calibration_path, self_test_path
from engine.devices.device import Rig
from engine.devices.rig_file import read_rig
from engine.errors import ArgumentError
from engine.fit.calibration import read_calibration
from engine.fit.initial_layout import initial_layout
from engine.fit.strategies.catalogue import auto_layout, find_strategy
from engine.gguf.model_file import ModelFile
from engine.gguf.reader import read_model
from engine.layout.context_settings import ContextSettings
from engine.layout.layout import Layout
from engine.layout.layout_file import read_layout
from engine.runner.discovery import discover
from engine.runner.self_test import read_verdicts, with_verdicts


@dataclass(frozen=True, slots=True)
class PlanInputs:
    """One layout of one model on one rig; `explanation` is an automatic layout's."""

    model: ModelFile
    rig: Rig
    layout: Layout
    context: ContextSettings
    explanation: str | None = None


def read_inputs(options: Namespace) -> PlanInputs:
    """Read what `options` name; without a rig file discover this machine, without a layout make the initial one."""
    check_auto_options(options)
    if options.auto is not None:
        find_strategy(options.auto)
        if options.layout is not None:
            raise ArgumentError("--auto finds a layout and --layout gives one; leave one of them out.")
    model = read_model(options.file)
    rig = read_rig(options.rig) if options.rig is not None else None
    if options.layout is not None:
        document = read_layout(options.layout, n_layers=model.n_layers)
        context = _with_overrides(document.context, options)
        return PlanInputs(model, with_margins(rig or this_machine(), options.margin), document.layout, context)
    context = _with_overrides(ContextSettings(), options)
    rig = with_margins(rig or this_machine(), options.margin)
    if options.auto is not None:
        constraints = constraints_of(options, rig, model.n_layers)
        found = auto_layout(options.auto, model, rig, context, constraints)
        return PlanInputs(model, rig, found.layout, found.context, found.explanation)
    return PlanInputs(model, rig, initial_layout(model, rig, context), context)


def this_machine() -> Rig:
    """Return this machine's devices with what earlier loads and self-tests in the window have shown of them."""
    return read_calibration(calibration_path()).apply(with_self_tests(discover()))


def with_self_tests(rig: Rig) -> Rig:
    """Return `rig` with the verdicts of the self-test."""
    return with_verdicts(rig, read_verdicts(self_test_path()))


def _with_overrides(context: ContextSettings, options: Namespace) -> ContextSettings:
    """Return `context` with what `plan` was asked on its command line."""
    chosen = {
        "n_ctx": getattr(options, "ctx", None),
        "type_k": getattr(options, "type_k", None),
        "type_v": getattr(options, "type_v", None),
        "n_ubatch": getattr(options, "ubatch", None),
    }
    given = {key: value for key, value in chosen.items() if value is not None}
    return msgspec.structs.replace(context, **given) if given else context

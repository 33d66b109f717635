"""Makes the inputs of `plan`, `load` and `embed` from their options: model, rig, layout, settings, `LoadSpec`.

It also saves the speeds that are measured during answers, for later commands.
"""

from __future__ import annotations

import logging
import sys
import time
from argparse import Namespace
from collections.abc import Callable

from msgspec import Struct

from app.cli.auto_options import check_auto_options, constraints_of, with_margins
from app.cli.devices import find_machine
from app.cli.hand_options import hand_layout, has_hand_layout, with_hand_overrides
from app.cli.placing_options import listed_devices, placed_modules, rig_of, with_modules
from app.cli.settings_options import context_of, side_files_of
from app.cli.used_devices import settle_used
from app.paths import calibration_path, speeds_path
from engine.base.errors import ArgumentError, EngineError, RuleViolationError
from engine.base.values import replace
from engine.devices.device import ComputingNeed, Rig
from engine.devices.rig_file import read_rig
from engine.machines.rigs.speeds import bare_speed, known_speeds, learnt, timed_answer
from engine.model.gguf.model_file import ModelFile
from engine.model.gguf.reader import read_model
from engine.planning.fit.calibration import change_calibration, read_calibration
from engine.planning.fit.measured_batches import with_measured_batches
from engine.planning.fit.speed_book import SpeedBook, change_speed_book, read_speed_book
from engine.planning.fit.strategies.catalogue import auto_layout, find_strategy
from engine.planning.fit.strategies.constraints import SearchLimit
from engine.planning.fit.strategies.fastest import initial_layout
from engine.planning.layout.layout import Layout
from engine.planning.layout.layout_file import LayoutFile, read_layout
from engine.planning.memory.model_memory import ModelMemory
from engine.planning.plan.edit import Edit
from engine.planning.plan.plan import Plan
from engine.planning.settings.context_settings import ContextSettings
from engine.runtime.probing.probe import probe
from engine.runtime.session.events import Done
from engine.runtime.session.load_spec import LoadSpec, RetryPolicy


def spec_of(options: Namespace, explain: Callable[[str], None]) -> LoadSpec:
    """Return the `LoadSpec` (plan and rules for retries) that `options` request.

    `explain`: called with a text that says why an automatic layout was chosen.

    Raises:
        EngineError: if a file cannot be read, or if the plan violates a rule.
    """
    asked = read_inputs(options)
    if asked.explanation is not None:
        explain(asked.explanation)
    return spec_for_plan(options, asked.plan)


def spec_for_plan(options: Namespace, plan: Plan) -> LoadSpec:
    """Return the `LoadSpec` for `plan`: the plan with the options for retries and the stall limit.

    Raises:
        EngineError: if `plan` violates a rule, or if its constraints are impossible.
    """
    plan = load_plan(plan)
    retry = RetryPolicy(options.retry, constraints_of(options, plan.rig, plan.model.n_layers))
    return LoadSpec(plan, retry, options.stall_limit)


def load_plan(plan: Plan) -> Plan:
    """Return `plan` if it can be loaded.

    If its memory cannot be computed, the returned plan has the numbers of a probe (load without allocating memory).

    Raises:
        RuleViolationError: if `plan` violates a rule.
    """
    if plan.violations:
        raise RuleViolationError(tuple((v.rule, v.message, v.remedy) for v in plan.violations))
    return plan if plan.report.probe_only is None else _probed(plan)


def _probed(plan: Plan) -> Plan:
    """Return the plan with the numbers of a probe (load without allocating memory); unchanged if the probe fails.

    The failure is not reported here, because the load itself will fail for the same reason.
    """
    try:
        return probe(plan)
    except EngineError:
        return plan


_log = logging.getLogger("layerdeck.speeds")


def learn_speed(plan: Plan, done: Done) -> None:
    """Save the speed of an answer with `plan`, for later predictions. A failure is only logged.

    `done`: last event of the answer, with the speed.
    """
    answer = timed_answer(done)

    def learn(book: SpeedBook) -> SpeedBook:
        predicted = bare_speed(plan, book, answer)
        return book if predicted is None else learnt(book, plan, predicted, answer)

    try:
        change_speed_book(speeds_path(), learn)
    except EngineError as error:
        _log.info("speeds: %s", error.summary())


def learn_need(need: ComputingNeed) -> None:
    """Save how much memory a model used beyond its forecast while it computed. A failure is only logged.

    May be called in any thread.
    """
    try:
        change_calibration(calibration_path(), lambda calibration: calibration.with_need(need))
    except EngineError as error:
        _log.info("calibration: %s", error.summary())


# Seconds between two lines of progress.
_PATIENCE_S = 2.0


class CliPlan(Struct, frozen=True):
    """The plan that options of the command line describe.

    `explanation`: a text that says why an automatic layout was chosen; None for other layouts.
    """

    plan: Plan
    explanation: str | None = None


def read_inputs(options: Namespace) -> CliPlan:
    """Return the plan that `options` request. Defaults: the devices of this computer, and the initial layout."""
    # Before files are read and devices are found, which takes seconds.
    check_layout_options(options)
    model = read_model(options.file)
    rig = read_rig(options.rig) if options.rig is not None else None
    document = read_layout(options.layout, n_layers=model.n_layers) if options.layout is not None else None
    return plan_request_on(
        # A rig file has the fingerprints of paired computers; `reach` opens tunnels to them.
        options,
        model,
        with_margins(options.tunnels.reach(settle_used(options, rig or this_machine())), options.margin),
        document,
    )


def check_layout_options(options: Namespace) -> None:
    """Check the options that choose a layout.

    Raises:
        EngineError: if the options exclude each other, or name a strategy that does not exist.
    """
    check_auto_options(options)
    has_hand_layout(options)
    if options.auto is not None:
        find_strategy(options.auto)
        if options.layout is not None:
            raise ArgumentError("--auto and --layout exclude each other; remove one.")
    if options.device is not None and options.layout is not None:
        raise ArgumentError("--device and --layout exclude each other: the layout names devices; remove one.")


def plan_request_on(options: Namespace, model: ModelFile, rig: Rig, document: LayoutFile | None) -> CliPlan:
    """Return the plan that the options request for this model and rig.

    `document`: the layout file; None if there is none.
    """
    context = context_of(options, model, document.context if document is not None else None)
    side_files = side_files_of(options, model, rig, document)
    memory, placed = ModelMemory(model), placed_modules(options, rig)

    def asked(layout: Layout, used: ContextSettings = context, explanation: str | None = None) -> CliPlan:
        moved = with_hand_overrides(with_modules(layout, placed, model), options, model, rig)
        edit = Edit(moved, used, side_files)
        if document is None and options.ubatch is None and options.batch is None:
            edit = with_measured_batches(memory, rig, edit)
        return CliPlan(Plan(memory, rig, edit), explanation)

    if document is not None:
        return asked(document.layout)
    if has_hand_layout(options):
        return asked(hand_layout(options, model, rig))
    speeds = known_speeds(rig, read_speed_book(speeds_path()))
    listed = listed_devices(options, rig)
    if options.auto is None and listed is None and "output" not in placed and not options.experts:
        return asked(initial_layout(memory, rig, context, side_files, speeds))
    constraints = replace(
        constraints_of(options, rig, model.n_layers),
        side_files=side_files,
        speeds=speeds,
        watch=SearchLimit(on_tried=patience()),
    )
    strategy = options.auto
    if strategy is None:
        # As in llama.cpp, listed devices share the model by their free memory. One device needs no strategy.
        shares = listed is not None and len(listed) > 1
        strategy, constraints = "proportional" if shares else "fastest", replace(constraints, split=shares)
    found = auto_layout(strategy, memory, rig_of(options, rig), context, constraints)
    return asked(found.layout, found.context, found.explanation)


def patience() -> Callable[[int], None]:
    """Return a callback that prints the progress of a layout search every few seconds, on a terminal only."""
    reported_s = time.monotonic()

    def report(n_tried: int) -> None:
        nonlocal reported_s
        if time.monotonic() - reported_s >= _PATIENCE_S and sys.stderr.isatty():
            reported_s = time.monotonic()
            print(f"finding a layout: {n_tried} tried; Ctrl-C ends the search", file=sys.stderr, flush=True)

    return report


def this_machine() -> Rig:
    """Return the devices of this computer, with the results of earlier loads, self-tests and measurements."""
    return read_speed_book(speeds_path()).apply(read_calibration(calibration_path()).apply(find_machine()))

"""The `plan` command."""

from __future__ import annotations

from argparse import Namespace

from app.cli import exit_codes
from app.cli.inputs import read_inputs
from app.cli.output import print_document, print_line
from app.paths import speeds_path
from engine.base.errors import BusyError, UnreachableError
from engine.machines.rigs.speeds import known_speeds
from engine.planning.fit.speed_book import read_speed_book
from engine.planning.plan.plan import Plan
from engine.planning.plan.plan_document import plan_document, plan_text
from engine.planning.plan.preview import plan_sendings, plan_speed
from engine.planning.speed.work import Work
from engine.runtime.probing.probe import probe


def run_plan(options: Namespace) -> int:
    """Print the forecast of a layout."""
    asked = read_inputs(options)
    plan = asked.plan
    if not plan.violations and options.probe:
        plan = probe(plan)
    elif not plan.violations and plan.report.probe_only is not None:
        plan = _probed_or_known(plan)
    speeds = known_speeds(plan.rig, read_speed_book(speeds_path()))
    speed, sent = plan_speed(Work(plan.model), plan, speeds), plan_sendings(plan, speeds)
    if options.json:
        print_document(plan_document(plan, asked.explanation, speed, sent))
    else:
        print_line(plan_text(plan, asked.explanation, speed, sent))
    if plan.violations:
        return exit_codes.ARGUMENT
    return exit_codes.OK if plan.report.fits else exit_codes.DOES_NOT_FIT


def _probed_or_known(plan: Plan) -> Plan:
    """Return the plan with numbers of the engine. If its devices are missing or in use, return it as it is known."""
    try:
        return probe(plan)
    except BusyError:
        return plan
    except UnreachableError as error:
        # Without an endpoint, a local device is missing here: its forecast is still of use.
        if error.endpoint is not None:
            raise
        return plan

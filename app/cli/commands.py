"""The `plan` command."""

from __future__ import annotations

from argparse import Namespace

from app.cli import exit_codes
from app.cli.inputs import PlanInputs, read_inputs
from app.cli.output import print_document, print_line
from engine.errors import BusyError, UnreachableError
from engine.fit.plan_document import plan_document, plan_text
from engine.fit.preview import make_report
from engine.fit.report import FitReport
from engine.runner.probe import probe_report


def run_plan(options: Namespace) -> int:
    """Print the forecast of a layout."""
    inputs = read_inputs(options)
    asked = (inputs.model, inputs.rig, inputs.layout, inputs.context, inputs.side_files)
    report = make_report(*asked)
    broken = bool(report.violations)
    if not broken and options.probe:
        report = probe_report(*asked)
    elif not broken and report.probe_only is not None:
        report = _probed_or_known(inputs, report)
    if options.json:
        print_document(plan_document(inputs.model, inputs.layout, inputs.context, report, inputs.explanation))
    else:
        print_line(plan_text(inputs.model, inputs.layout, inputs.context, report, inputs.explanation))
    if broken:
        return exit_codes.ARGUMENT
    return exit_codes.OK if report.fits else exit_codes.DOES_NOT_FIT


def _probed_or_known(inputs: PlanInputs, report: FitReport) -> FitReport:
    """Return what the engine says; where the devices of a rig file are not here, or held by a load, what is known."""
    try:
        return probe_report(inputs.model, inputs.rig, inputs.layout, inputs.context, inputs.side_files)
    except BusyError:
        return report
    except UnreachableError as error:
        if error.endpoint is not None:
            raise
        return report

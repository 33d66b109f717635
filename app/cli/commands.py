"""The commands that load nothing: inspect, devices, plan, demo."""

from __future__ import annotations

from argparse import Namespace

from app.cli import exit_codes
from app.cli.inputs import PlanInputs, read_inputs
from app.cli.output import print_document, print_line, print_text, say
from app.paths import self_test_path, speeds_path
from app.speed_test import measured_book, speed_lines
from engine.demo.writer import write_demo_model
from engine.devices.rig_file import encode_rig
from engine.errors import BusyError, UnreachableError
from engine.fit.plan_document import plan_document, plan_text
from engine.fit.preview import make_report
from engine.fit.report import FitReport
from engine.fit.speed_book import read_speed_book, write_speed_book
from engine.gguf.reader import read_model
from engine.memory.inspect import inspect_document, inspect_text
from engine.rigs.search import find_devices
from engine.runner.probe import probe_report


def run_inspect(options: Namespace) -> int:
    """Print what a model is made of."""
    document = inspect_document(read_model(options.file))
    if options.json:
        print_document(document)
    else:
        print_line(inspect_text(document))
    return exit_codes.OK


def run_devices(options: Namespace) -> int:
    """Print this machine's rig file (always JSON: it is meant to be kept)."""
    rig = find_devices(self_test_path(), options.rpc)
    if options.measure:
        book, problems = measured_book(rig, read_speed_book(speeds_path()))
        write_speed_book(speeds_path(), book)
        for line in (*speed_lines(rig, book), *problems):
            say(line)
    print_text(encode_rig(rig).decode())
    return exit_codes.OK


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


def run_demo(options: Namespace) -> int:
    """Write the demo model."""
    write_demo_model(options.path)
    if options.json:
        print_document({"path": str(options.path), "size_bytes": options.path.stat().st_size})
    else:
        print_line(f"Wrote {options.path}. Try: layerdeck-cli load {options.path} --prompt hi -n 32")
    return exit_codes.OK

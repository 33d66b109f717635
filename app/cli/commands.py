"""The commands that load nothing: inspect, devices, plan, demo."""

from __future__ import annotations

from argparse import Namespace

from app.cli import exit_codes
from app.cli.inputs import read_inputs
from app.cli.output import print_document, print_line, print_text, say
from app.paths import self_test_path, speeds_path
from app.speed_test import measured_book, speed_lines
from engine.demo.writer import write_demo_model
from engine.devices.rig_file import encode_rig
from engine.errors import BusyError, UnreachableError
from engine.fit.plan_document import plan_document, plan_text
from engine.fit.speed_book import read_speed_book, write_speed_book
from engine.gguf.reader import read_model
from engine.memory.inspect import inspect_document, inspect_text
from engine.plan.plan import Plan
from engine.rigs.search import find_devices
from engine.runner.probe import probe


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
    asked = read_inputs(options)
    plan = asked.plan
    if not plan.violations and options.probe:
        plan = probe(plan)
    elif not plan.violations and plan.report.probe_only is not None:
        plan = _probed_or_known(plan)
    if options.json:
        print_document(plan_document(plan, asked.explanation))
    else:
        print_line(plan_text(plan, asked.explanation))
    if plan.violations:
        return exit_codes.ARGUMENT
    return exit_codes.OK if plan.report.fits else exit_codes.DOES_NOT_FIT


def _probed_or_known(plan: Plan) -> Plan:
    """Return what the engine says; where the devices of a rig file are not here, or held by a load, what is known."""
    try:
        return probe(plan)
    except BusyError:
        return plan
    except UnreachableError as error:
        if error.endpoint is not None:
            raise
        return plan


def run_demo(options: Namespace) -> int:
    """Write the demo model."""
    write_demo_model(options.path)
    if options.json:
        print_document({"path": str(options.path), "size_bytes": options.path.stat().st_size})
    else:
        print_line(f"Wrote {options.path}. Try: layerdeck-cli load {options.path} --prompt hi -n 32")
    return exit_codes.OK

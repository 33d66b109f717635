"""The `doctor` command: examines this computer, and writes the results as a table and as a file to send to others."""

from __future__ import annotations

import signal
import sys
from argparse import Namespace
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from app.cli import exit_codes
from app.cli.devices import find_machine
from app.cli.output import check_out, error_of, print_document, print_line, print_stderr, report_error
from app.demo import find_demo
from app.packs import pack_installer
from app.paths import calibration_path, engine_checks_path, self_test_path, speeds_path
from engine.base.cancellation import CancelToken
from engine.base.confinement import TABLE, cells
from engine.devices.device import Rig
from engine.machines.doctor.machine import Files, MachineSteps, find_rig, personal_names
from engine.machines.doctor.report import Progress, Report, document, examine, table, without_names, write_report
from engine.planning.fit.calibration import read_calibration

_INTERRUPTS = tuple(getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name))


def run_doctor(options: Namespace) -> int:
    """Examine this computer, print the results, write the file of --out, and return the exit code.

    An interrupt ends the examination; the results until then are printed.
    """

    check_out(options.out)
    try:
        report = _examined(options)
    except KeyboardInterrupt:
        # Devices are searched before the examination, and there the signal raises.
        report = Report(is_whole=False)
    _clear()
    problem = None if options.out is None else error_of(lambda: write_report(options.out, report))
    _print_report(report, options)
    if problem is not None:
        # Not as a second document.
        report_error(problem, as_json=False)
        return exit_codes.exit_code(problem.kind)
    if options.out is not None and not options.json:
        print_line(f"Written to {options.out}.")
    if not report.is_whole:
        return exit_codes.INTERRUPTED
    return exit_codes.OK if report.is_sound else exit_codes.exit_code("crashed")


def _examined(options: Namespace) -> Report:
    """Examine this computer, and return the results without names of persons and computers."""

    def find() -> Rig:
        return find_machine(options.rpc, options.tunnels.lent_devices(options.peer))

    # One machine that does not answer is no reason to leave this one's devices aside.
    rig, problem = find_rig(find, *([find_machine] if options.rpc or options.peer else []))
    rig = read_calibration(calibration_path()).apply(rig)
    cancel = CancelToken()
    packs = pack_installer().listed()
    with _cancelling(cancel), MachineSteps(rig, examined_files(), cancel, packs=packs, problem=problem) as machine:
        steps = machine.engine_steps() if options.engine else machine.steps()
        # The report is meant to be sent to others.
        return without_names(examine(steps, _show, cancel), personal_names(rig, Path.home(), _machines(options)))


def _machines(options: Namespace) -> list[str]:
    """Return the names of other computers that the report must not contain: RPC endpoints and paired computers."""
    return [*options.rpc, *options.peer, *(options.tunnels.known_names() if options.peer else ())]


def examined_files() -> Files:
    """Return the paths that `doctor` needs: the demo model, and the stored checks, self-tests and measurements."""
    return Files(find_demo().path, engine_checks_path(), self_test_path(), calibration_path(), speeds_path())


def _print_report(report: Report, options: Namespace) -> None:
    if options.json:
        print_document(document(report))
        return
    _print_table(table(report.checks))
    if not options.engine:
        rows = [cells(rights) for rights in TABLE]
        print_line("\nWhat children can do besides reading code:")
        _print_table([tuple(rows[0]), *(tuple(row.values()) for row in rows)])
    print_line(f"\n{report.summary}")


def _print_table(rows: Sequence[tuple[str, ...]]) -> None:
    """Print rows in columns. The last column may be long, and is not padded."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)][:-1]
    for *first, last in rows:
        shown = "  ".join(cell.ljust(width) for cell, width in zip(first, widths, strict=True))
        print_line(f"{shown}  {last}".rstrip())


def _show(progress: Progress) -> None:
    if progress.words and sys.stderr.isatty():
        print_stderr(f"{progress.words} ({progress.done + 1} of {progress.total})", end="", over=True)


def _clear() -> None:
    if sys.stderr.isatty():
        print_stderr("", end="", over=True)


@contextmanager
def _cancelling(cancel: CancelToken) -> Iterator[None]:
    """Make interrupt signals cancel the examination, instead of ending the program, within a `with` block."""

    def on_signal(_number: int, _frame: FrameType | None) -> None:
        # Python runs the handler between two bytecodes of the main thread: it only sets the token.
        cancel.cancel()

    before = {number: signal.signal(number, on_signal) for number in _INTERRUPTS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)

"""The `bench` command: compares layouts by measuring them in turns."""

from __future__ import annotations

import copy
import sys
from argparse import Namespace
from contextlib import ExitStack
from pathlib import Path

from app.cli import exit_codes
from app.cli.auto_options import check_auto_options, with_margins
from app.cli.bench_options import ALL, check_bench_options, preset_of
from app.cli.entry import on_interrupt
from app.cli.inputs import load_plan, plan_request_on, this_machine
from app.cli.output import error_of, print_document, print_line, print_notice, print_stderr, report_error
from app.paths import speeds_path
from engine.base.cancellation import CancelToken
from engine.base.errors import EngineError
from engine.base.numa import read_nodes
from engine.devices.rig_file import read_rig
from engine.machines.bench.candidates import Candidate, numa_candidates
from engine.machines.bench.results import BenchResults, import_note, read_results, write_results
from engine.machines.bench.run import BenchRequest, run_benchmark
from engine.machines.bench.runner import BenchProgress
from engine.machines.bench.tables import csv_text, markdown_text, text_of
from engine.machines.rigs.lab import LabRig, memory_not_bound, numa_rig
from engine.model.gguf.reader import read_model
from engine.planning.fit.speed_book import SpeedBook, change_speed_book, read_speed_book
from engine.planning.fit.strategies.catalogue import find_strategy
from engine.planning.layout.layout_file import LayoutFile, free_name, read_layout


def run_bench(options: Namespace) -> int:
    """Measure the layouts, print the comparison, and save the measured speeds for predictions; return the exit code."""
    check_bench_options(options)
    # Before minutes of measuring: a file that cannot be read is an error of the command line.
    others = [read_results(path) for path in options.beside]
    cancel = CancelToken()
    book = read_speed_book(speeds_path())
    # Outside of `on_interrupt`: the searches for devices and layouts have no token, and an interrupt ends them.
    found = None if options.numa_nodes else _request(options)
    with on_interrupt(cancel.cancel), ExitStack() as stack:
        if found is None:
            lab = stack.enter_context(numa_rig(read_nodes()))
            results, learnt = run_benchmark(
                _numa_request(options, lab), book, cancel, _ProgressLine(), workers=lab.processes
            )
        else:
            results, learnt = run_benchmark(found, book, cancel, _ProgressLine(), workers=None)
    _keep(learnt, book)
    problem = None if options.out is None else error_of(lambda: write_results(options.out, results))
    _print(options, results, others)
    if problem is not None:
        # Not as a second document.
        report_error(problem, as_json=False)
        return exit_codes.exit_code(problem.kind)
    if cancel.cancelled:
        return exit_codes.INTERRUPTED
    if any(each.samples for each in results.layouts):
        return exit_codes.OK
    return exit_codes.exit_code(next((each.problem_kind for each in results.layouts if each.problem), "crashed"))


def _request(options: Namespace) -> BenchRequest:
    automatic = options.auto == ALL
    model = read_model(options.file)
    documents = [(path, read_layout(path, n_layers=model.n_layers)) for path in options.layout]
    asked = copy.copy(options)
    if automatic:
        asked.auto = None
    # Those who read `layout` elsewhere expect one file or none.
    asked.layout = options.layout[0] if options.layout else None
    check_auto_options(asked)
    if asked.auto is not None:
        find_strategy(asked.auto)
    rig = read_rig(options.rig) if options.rig is not None else None
    rig = with_margins(options.tunnels.reach(rig or this_machine()), options.margin)
    found: list[Candidate] = []
    # No file is the initial layout, or that of a strategy.
    named: list[tuple[Path | None, LayoutFile | None]] = [*documents] or [(None, None)]
    for path, document in named:
        asked.layout = path
        plan = load_plan(plan_request_on(asked, model, rig, document).plan)
        taken = [each.name for each in found]
        found.append(Candidate(_name(path, options.auto if not automatic else None, taken), plan))
    return BenchRequest(tuple(found), preset_of(options), automatic)


def _numa_request(options: Namespace, lab: LabRig) -> BenchRequest:
    if warning := memory_not_bound(lab.unbound_nodes):
        print_stderr(warning)
    asked = copy.copy(options)
    asked.layout = None
    base = plan_request_on(asked, read_model(options.file), lab.rig, None).plan
    found = (Candidate(each.name, load_plan(each.plan), each.reason) for each in numa_candidates(base))
    return BenchRequest(tuple(found), preset_of(options))


def _name(path: Path | None, strategy: str | None, taken: list[str]) -> str:
    """Return a name for a layout: the name of its file, of its strategy, or "initial".

    A name that is in `taken` gets a number.
    """
    return free_name(strategy or "initial" if path is None else path.stem, taken)


class _ProgressLine:
    """Callback that prints progress on a single line of a terminal, which each call overwrites."""

    def __call__(self, progress: BenchProgress) -> None:
        if sys.stderr.isatty():
            line = f"{progress.words} ({progress.done} of {progress.total}{progress.left_words})"
            print_stderr(line, end="", over=True)


def _keep(learnt: SpeedBook, before: SpeedBook) -> None:
    """Save the answer speeds that a comparison has measured, for predictions.

    A failure is only printed, because the comparison itself has succeeded.
    `learnt`, `before`: the speed book after and before the comparison.
    """
    if learnt == before:
        return
    try:
        # Read again: the measurement took minutes, and a window may have written to the book meanwhile.
        change_speed_book(speeds_path(), lambda stored: stored.with_changes(before, learnt))
    except EngineError as error:
        print_notice(error.summary())


def _print(options: Namespace, results: BenchResults, others: list[BenchResults]) -> None:
    if sys.stderr.isatty():
        print_stderr("", end="", over=True)
    if options.json:
        print_document({"results": results, "beside": others} if others else results)
        return
    write = csv_text if options.csv else markdown_text if options.markdown else text_of
    for each in (results, *others):
        if note := import_note(results.model, each.model):
            print_stderr(note)
        # Saved results may be from others: each format is escaped.
        print_line(write(each))
        if not options.csv and each is not (others or [results])[-1]:
            print_line("")
    if write is not text_of and results.ended:
        print_stderr(results.ended)

"""A request for a benchmark, and the function that runs it with a real child process, for command line and window."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from msgspec import Struct

from engine.base.cancellation import CancelToken
from engine.devices.telemetry.processes import WorkerProcess
from engine.machines.bench.candidates import Candidate, Predictor, settings_candidates, strategy_candidates
from engine.machines.bench.choices import choices_of
from engine.machines.bench.loads import SessionSubject
from engine.machines.bench.readings import DeviceWatch
from engine.machines.bench.results import BenchResults, Preset
from engine.machines.bench.runner import Bench, BenchProgress
from engine.planning.fit.speed_book import SpeedBook


class BenchRequest(Struct, frozen=True):
    """A request for a benchmark: layouts of one model to compare, of which the first is the base.

    `candidates`: the layouts. `preset`: what is measured: lengths, depths and number of rounds.
    `automatic`: whether to try also the layouts of the strategies, and other settings of the fastest layout.
    """

    candidates: tuple[Candidate, ...]
    preset: Preset
    automatic: bool = False


def run_benchmark(
    request: BenchRequest,
    book: SpeedBook,
    cancel: CancelToken,
    on_progress: Callable[[BenchProgress], None],
    *,
    workers: Mapping[str, WorkerProcess] | None = None,
) -> tuple[BenchResults, SpeedBook]:
    """Run a benchmark, and return its results and `book`, updated with the measured speeds and fastest settings.

    Blocks for minutes; `cancel` ends it within seconds.

    `book`: measured speeds of devices.
    `on_progress`: called with the progress.
    `workers`: processes of workers that this program started, by endpoint.

    Raises:
        CancelledError: if the benchmark was cancelled before the first load.
        EngineError: if no candidates can be found.
    """
    first, *others = request.candidates
    predictor = Predictor(book, request.preset)
    if request.automatic:
        known = {each.plan.edit.layout for each in request.candidates}
        found = strategy_candidates(first.plan, book, cancel)
        others += [each for each in found if each.plan.edit.layout not in known]
    with SessionSubject(cancel) as subject, DeviceWatch(first.plan.rig, workers) as watch:
        bench = Bench(subject, watch, request.preset, predictor, on_progress)
        if request.automatic:
            results = bench.search(first, others, settings_candidates(request.preset))
        else:
            results = bench.run(request.candidates)
        return results, predictor.book.with_choices(choices_of(results, bench.candidates))

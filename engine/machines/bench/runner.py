"""Runs a benchmark: layouts in turns, warm-up, samples, and the search among candidates.

`Bench.run` measures given layouts in turns. `Bench.search` measures the best layout so far in turns with one candidate
after another, in the order of their predicted times. It stops when no further candidate is predicted to win. Both
return results also if they are cancelled or if a layout fails: the earlier samples are kept.
"""

from __future__ import annotations

import platform
import time
from collections.abc import Callable, Iterator, Sequence
from math import inf
from statistics import fmean

from msgspec import Struct, field

from engine.base.engine_build import engine_version, own_version
from engine.base.errors import CancelledError
from engine.base.language import tr
from engine.base.processor import own_processor
from engine.base.units import format_rough_time
from engine.base.values import replace
from engine.devices.device import Rig
from engine.machines.bench.candidates import Candidate, Predictor
from engine.machines.bench.loads import BenchAnswer, LoadEndedError, Subject
from engine.machines.bench.readings import Watch, Window, device_state, peak_bytes
from engine.machines.bench.results import (
    FULL,
    BenchMachine,
    BenchModel,
    BenchResults,
    DeviceMemory,
    MachineDevice,
    Measured,
    Preset,
    Sample,
    TimedLoad,
    compare,
    with_comparisons,
)
from engine.machines.bench.statistics import is_warm, turn_order
from engine.planning.layout.layout_file import free_name, layout_document
from engine.planning.plan.plan import Plan
from engine.runtime.session.events import Loaded

WORTH = 1.05
"""A candidate is measured only if its predicted time is at most this factor times the time of the best layout."""
MIN_TOKENS = 8
"""Smallest number of generated tokens for which a speed is computed.

The time of the first token is counted with the prompt.
"""
_WARM_UP_TOKENS = 64
"""Largest number of prompt tokens of a request in the warm-up. Only the first one is as long as a measured one.

The first large batch is slower than later ones: pages of the compute buffer are touched for the first time (3 % of a
prompt on the CPU), and drivers load the kernels for large batches.
"""
_SPARE_TOKENS = 256
"""Tokens that stay free in the context when it is filled for the depth `FULL`: prompt lengths are approximate."""


class BenchProgress(Struct, frozen=True):
    """Progress of a benchmark.

    `words`: the current action, for people.
    `done`, `total`: number of completed measurements, and of all measurements; `total` may shrink in a search.
    `results`: the results so far.
    `left_s`: estimated remaining seconds, from the measured loads and answers; None before the first measurement.
    """

    words: str
    done: int
    total: int
    results: BenchResults
    left_s: float | None = None

    @property
    def left_words(self) -> str:
        """The remaining time as the end of a progress text, such as ", about 5 min left"; empty if unknown."""
        return "" if self.left_s is None else tr(", about {time} left", time=format_rough_time(self.left_s))


class _Trial(Struct):
    """A candidate with its measured speeds and readings.

    `loaded`: event of its last load; None before the first one.
    `windows`: readings of loads and answers, each with the number of generated tokens.
    `is_over`: whether it failed and is not measured any more.
    `is_learnt`: whether its measured speeds have already corrected the predictions.
    """

    candidate: Candidate
    measured: Measured
    loaded: Loaded | None = None
    windows: list[tuple[Window, int]] = field(default_factory=list)
    is_over: bool = False
    is_learnt: bool = False

    @property
    def name(self) -> str:
        return self.candidate.name


Change = Callable[[str, Plan], Sequence[Candidate]]
"""Function from a layout's name and plan to candidates that differ from it in one setting."""


def _nothing(_progress: BenchProgress) -> None:
    """Ignore the progress. Default of `Bench.on_progress`."""


class Bench:
    """Measures layouts of one model: the main object of a benchmark. It must be used in one thread only.

    It loads a layout in `subject`, has it answer, and reads the devices with `watch` meanwhile. Layouts are measured in
    turns, so that slow changes such as heat affect all of them alike.

    `subject`: process that loads layouts and answers.
    `watch`: reads memory, clocks and power of the devices.
    `preset`: lengths, depths and number of rounds.
    `predictor`: predicts the times of candidates, and is corrected by measured speeds.
    `on_progress`: called with the progress.
    `clock`: returns seconds.
    """

    def __init__(
        self,
        subject: Subject,
        watch: Watch,
        preset: Preset,
        predictor: Predictor,
        on_progress: Callable[[BenchProgress], None] = _nothing,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._subject = subject
        self._watch = watch
        self._preset = preset
        self._predictor = predictor
        self._on_progress = on_progress
        self._clock = clock
        self._trials: list[_Trial] = []
        self._held: _Trial | None = None
        self._rounds = 0
        self._done, self._total = 0, 0
        self._n_in_turns = 1
        """Number of layouts that are measured in the present round."""
        self._load_times_s: list[float] = []
        """Durations of the loads, each with its warm-up."""
        self._turn_times_s: list[float] = []
        """Durations of the turns after their loads."""
        self._prompts: dict[tuple[int, int], str] = {}
        self._results: BenchResults | None = None

    @property
    def candidates(self) -> tuple[Candidate, ...]:
        """The layouts that were measured so far."""
        return tuple(each.candidate for each in self._trials)

    # ------------------------------------------------------------------ runs

    def run(self, candidates: Sequence[Candidate]) -> BenchResults:
        """Measure the layouts in turns and return the results; the first layout is the base of the comparisons."""
        trials = [self._add(each, against=candidates[0].name if at else "") for at, each in enumerate(candidates)]
        self._total = self._preset.n_rounds * len(trials)

        def measure() -> None:
            self._take_turns(trials)
            self._learn(trials)

        return self._to_the_end(measure)

    def search(self, first: Candidate, others: Sequence[Candidate], changes: Sequence[Change] = ()) -> BenchResults:
        """Search for the fastest layout and return the results.

        The best layout so far, initially `first`, is measured in turns with each of `others`. Then each function of
        `changes` makes candidates from the best layout, and each candidate is measured in turns with it.
        """
        best = self._add(first, against="")

        def measure() -> None:
            found = self._best_of(best, others)
            for change in changes:
                found = self._best_of(found, change(found.name, found.candidate.plan))
            if not best.measured.samples and not best.is_over:
                self._take_turns([best])
                self._learn([best])

        return self._to_the_end(measure)

    def _best_of(self, best: _Trial, candidates: Sequence[Candidate]) -> _Trial:
        """Measure the best layout in turns with one candidate after another, and return the best layout found.

        The candidate with the shortest predicted time comes first; candidates without a prediction come last.
        Candidates that are predicted to be slower than the best layout are not measured.
        """
        waiting = list(candidates)
        while waiting:
            # Anew for each rival: the measurements before have corrected the predictions.
            predicted = [self._predictor.answer_s(each.plan) for each in waiting]
            worth = [(each or inf, at) for at, each in enumerate(predicted) if _may_win(best.measured, each)]
            if not worth:
                self._note(tr("No further layout is predicted to be faster than {name}.", name=best.name))
                break
            _, at = min(worth)
            trial = self._add(waiting.pop(at), against=best.name)
            # Two layouts have a turn in each round of this candidate, and of those that still wait.
            self._total = self._done + (2 - best.is_over) * self._preset.n_rounds * (1 + len(waiting))
            self._take_turns([best, trial])
            self._learn([best, trial])
            found = compare(best.measured, trial.measured, "answer")
            if best.is_over or (found is not None and found.verdict == "faster"):
                best = trial
        return best

    def _learn(self, trials: Sequence[_Trial]) -> None:
        for trial in trials:
            if not trial.is_learnt:
                trial.is_learnt = True
                self._predictor.learn(trial.candidate.plan, trial.measured)

    def _take_turns(self, trials: Sequence[_Trial]) -> None:
        """Measure the layouts in turns, once in each round of the preset.

        Layouts that fail are left out of later rounds.
        """
        for number in range(self._preset.n_rounds):
            going = {trial.name: trial for trial in trials if not trial.is_over}
            # All layouts have failed.
            if not going:
                return
            self._n_in_turns = len(going)
            for name in turn_order(tuple(going), self._rounds):
                self._take_turn(going[name], n_later=self._preset.n_rounds - number - 1)
            self._rounds += 1

    def _take_turn(self, trial: _Trial, n_later: int) -> None:
        """Load and measure a layout once. If it fails, it gets no further turns.

        `n_later`: number of turns that the layout still has after this one. After a failure they no longer count in the
        total of the progress.
        """
        begun_s = self._clock()
        try:
            if self._held is not trial:
                self._load(trial)
                self._load_times_s.append(self._clock() - begun_s)
                begun_s = self._clock()
            for depth in self._depths(trial):
                self._measure(trial, depth)
            self._turn_times_s.append(self._clock() - begun_s)
        except LoadEndedError as error:
            # What was measured before stays, and the other layouts go on.
            trial.is_over, self._held = True, None
            self._total -= n_later
            trial.measured = replace(trial.measured, problem=error.summary(), problem_kind=error.reason)
        self._done += 1
        self._summarise(trial)
        self._report(tr("Measuring {name}", name=trial.name))

    def _to_the_end(self, work: Callable[[], None]) -> BenchResults:
        ended = ""
        try:
            work()
        except CancelledError:
            ended = tr("The comparison was cancelled. The measurements so far are kept.")
        for trial in self._trials:
            self._summarise(trial)
        return with_comparisons(replace(self._known(), ended=ended))

    # ------------------------------------------------------------------ one turn

    def _load(self, trial: _Trial) -> None:
        self._held = None
        self._report(tr("Loading {name}", name=trial.name))
        self._watch.begin()
        loaded, seconds = self._subject.load(trial.candidate.plan)
        window = self._watch.end()
        self._held, trial.loaded = trial, loaded
        trial.windows.append((window, 0))
        if not self._note_sleep(window):
            loads = (*trial.measured.loads, TimedLoad(self._rounds, seconds))
            trial.measured = replace(trial.measured, loads=loads)
        self._warm_up(trial)

    def _warm_up(self, trial: _Trial) -> None:
        self._report(tr("Warming up {name}", name=trial.name))
        rates: list[float] = []
        while not is_warm(rates):
            # Prompts of warm-ups have numbers of their own, so that no sample finds its prompt in the KV cache.
            tokens = self._preset.prompt_tokens
            prompt = self._subject.prompt(min(_WARM_UP_TOKENS, tokens) if rates else tokens, 10_000 + len(rates))
            answer = self._subject.answer(prompt, max(MIN_TOKENS, self._preset.answer_tokens // 2))
            rates.append(answer.done.generation_tokens_per_second)

    def _depths(self, trial: _Trial) -> Iterator[int]:
        """Yield the preset's depths (tokens before the prompt) for which the layout's context has room.

        `FULL` is replaced by the number of tokens that fit.
        """
        context = trial.candidate.plan.settings.n_ctx_each
        room = context - self._preset.prompt_tokens - self._preset.answer_tokens
        full = max(0, room - _SPARE_TOKENS)
        for depth in self._preset.depths:
            if depth == FULL:
                if full > max((each for each in self._preset.depths if each <= full), default=0):
                    yield full
            elif depth <= max(0, room) or depth == 0:
                yield depth
            else:
                self._note(
                    tr(
                        "{name} was not measured at a depth of {depth} tokens: its context has only {context} "
                        "tokens. Set a longer context with --ctx.",
                        name=trial.name,
                        depth=depth,
                        context=context,
                    )
                )

    def _measure(self, trial: _Trial, depth: int) -> None:
        number, preset = self._rounds, self._preset
        head = ""
        if depth:
            # The same text for all rounds: it stays in the KV cache as long as the layout is loaded.
            head = self._prompt(depth, 20_000)
            self._subject.answer(head, 1)
        prompt = head + self._prompt(preset.prompt_tokens, number)
        self._watch.begin()
        answer = self._subject.answer(prompt, preset.answer_tokens)
        window = self._watch.end()
        if self._note_sleep(window):
            return
        sample = sample_of(answer, number, depth, window)
        samples = (*trial.measured.samples, sample)
        answers = dict(trial.measured.answers)
        if not depth:
            answers[str(number)] = answer.text
        trial.measured = replace(trial.measured, samples=samples, answers=answers)
        trial.windows.append((window, sample.answer_tokens))

    def _prompt(self, n_tokens: int, seed: int) -> str:
        key = (n_tokens, seed)
        if key not in self._prompts:
            self._prompts[key] = self._subject.prompt(n_tokens, seed)
        return self._prompts[key]

    # ------------------------------------------------------------------ results

    def _add(self, candidate: Candidate, against: str) -> _Trial:
        # Results are compared by name, and a file of the user may have the name of a strategy.
        candidate = replace(candidate, name=free_name(candidate.name, (each.name for each in self._trials)))
        plan = candidate.plan
        document = layout_document(plan.edit.as_file(plan.model.name))
        measured = Measured(
            name=candidate.name,
            layout=document,
            reason=candidate.reason,
            against=against,
            predicted_per_second=self._predictor.per_second(plan),
        )
        trial = _Trial(candidate, measured)
        self._trials.append(trial)
        return trial

    def _known(self) -> BenchResults:
        if self._results is None:
            plan = self._trials[0].candidate.plan
            self._results = BenchResults(
                layerdeck=own_version(),
                engine=engine_version(),
                made_s=int(time.time()),
                machine=machine_of(plan.rig),
                model=BenchModel(plan.model.name, plan.model.architecture, plan.model.size_bytes, plan.model.n_layers),
                preset=self._preset,
            )
        return replace(self._results, layouts=tuple(each.measured for each in self._trials))

    def _note(self, sentence: str) -> None:
        known = self._known()
        if sentence not in known.notes:
            self._results = replace(known, notes=(*known.notes, sentence))

    def _note_sleep(self, window: Window) -> bool:
        if window.slept_s <= 0:
            return False
        self._note(
            tr(
                "The computer slept for {seconds:.0f} s; measurements from that time are left out.",
                seconds=window.slept_s,
            )
        )
        return True

    def _summarise(self, trial: _Trial) -> None:
        """Write the devices' memory, clocks, temperatures and power into `trial.measured`, the results of a layout."""
        plan, loaded = trial.candidate.plan, trial.loaded
        if loaded is None:
            return
        forecast = {row.id: row.need_bytes for row in loaded.forecast}
        windows = [window for window, _ in trial.windows]
        memory = tuple(
            DeviceMemory(row.id, forecast.get(row.id), row.need_bytes, peak_bytes(windows, row.id))
            for row in loaded.devices
            if row.need_bytes or row.mapped_bytes
        )
        states = (device_state(trial.windows, device) for device in plan.rig.all_devices)
        trial.measured = replace(
            trial.measured, memory=memory, devices=tuple(each for each in states if each is not None)
        )

    def _report(self, words: str) -> None:
        total, results = max(self._total, self._done), with_comparisons(self._known())
        self._on_progress(BenchProgress(words, self._done, total, results, self._left_s()))

    def _left_s(self) -> float | None:
        turns = self._total - self._done
        if not self._turn_times_s or turns <= 0:
            return None
        # The layout that ends a round begins the next one, and stays loaded.
        loads = turns * (1 - 1 / self._n_in_turns)
        return turns * fmean(self._turn_times_s) + loads * fmean(self._load_times_s)


def sample_of(answer: BenchAnswer, number: int, depth: int, window: Window) -> Sample:
    """Return the speeds of an answer as a `Sample`. A speed that cannot be computed from the answer is None.

    `number`: number of the round.
    `depth`: tokens in the context before the prompt.
    `window`: readings during the answer.
    """
    done = answer.done
    computed = done.prompt_tokens - done.cached_tokens
    # A model whose memory cannot be cut back has read the whole depth again: the speed is not that of the prompt.
    has_depth = not depth or done.cached_tokens >= depth // 2
    return Sample(
        round=number,
        depth=depth,
        prompt_tokens=computed,
        answer_tokens=done.generated_tokens,
        prompt_per_second=done.prompt_tokens_per_second or None if has_depth else None,
        answer_per_second=done.generation_tokens_per_second or None if done.generated_tokens >= MIN_TOKENS else None,
        first_token_s=answer.first_token_s if has_depth else None,
        other_load=window.other_load,
    )


def _may_win(best: Measured, predicted_s: float | None) -> bool:
    """Return whether a candidate is worth measuring, because it may be faster than the best layout so far.

    True if its predicted time is at most `WORTH` times the measured time of the best layout, or if one of the two times
    is unknown.
    """
    best_s = best.middle("answer")
    return predicted_s is None or best_s is None or predicted_s <= best_s * WORTH


def machine_of(rig: Rig) -> BenchMachine:
    """Return the description of this machine for a file of results, without addresses and names of other machines."""
    devices = tuple(
        # A worker's name is that of its machine.
        MachineDevice(each.id, "" if each.is_rpc else each.name, each.backend, each.total_bytes)
        for each in rig.devices
    )
    return BenchMachine(
        f"{platform.system()} {platform.machine()}",
        rig.host.name,
        own_processor().threads,
        rig.host.total_bytes,
        devices,
    )

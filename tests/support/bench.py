"""Stand-ins for loads and device readings in tests of the speed comparison; their speeds are given by the test."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from msgspec import Struct, field

from engine.base.cancellation import CancelToken
from engine.base.errors import CancelledError
from engine.machines.bench.candidates import Candidate
from engine.machines.bench.loads import BenchAnswer, LoadEndedError
from engine.machines.bench.readings import Window
from engine.machines.bench.results import (
    BenchMachine,
    BenchModel,
    BenchResults,
    Measured,
    Preset,
    Sample,
    with_comparisons,
)
from engine.planning.plan.plan import Plan
from engine.runtime.session.events import Done, Loaded

PRESET = Preset("test", 5, 100, 32)


class FakeSubject(Struct, dict=True):
    """Stand-in for a session that loads plans and answers prompts.

    `speed`: returns tokens per second of a plan in its n-th answer.
    `texts`: returns the text that a plan answers.
    `fails`: called before each load or answer; returns an error message, or an empty text for success.
    `cancel_after`: number of answers after which the comparison is cancelled.
    """

    speed: Callable[[Plan, int], float]
    texts: Callable[[Plan], str] = lambda _plan: "a story"
    fails: Callable[[Plan, str], str] = lambda _plan, _what: ""
    cancel: CancelToken = field(default_factory=CancelToken)
    cancel_after: int | None = None
    loads: list[Plan] = field(default_factory=list)
    answers: list[tuple[Plan, str]] = field(default_factory=list)

    def load(self, plan: Plan) -> tuple[Loaded, float]:
        self._check(plan, "load")
        self.loads.append(plan)
        return Loaded(devices=plan.forecast, forecast=plan.forecast), 1.0

    def prompt(self, n_tokens: int, seed: int) -> str:
        return f"{seed} {'x ' * n_tokens}"

    def answer(self, prompt: str, max_tokens: int) -> BenchAnswer:
        plan = self.loads[-1]
        self._check(plan, "answer")
        self.answers.append((plan, prompt))
        rate = self.speed(plan, len(self.answers))
        tokens = len(prompt.split())
        done = Done(
            prompt_tokens=tokens,
            generated_tokens=max_tokens,
            prompt_tokens_per_second=10 * rate,
            generation_tokens_per_second=rate,
            stop_reason="length",
        )
        return BenchAnswer(done, self.texts(plan), tokens / (10 * rate))

    def _check(self, plan: Plan, what: str) -> None:
        if self.cancel_after is not None and len(self.answers) >= self.cancel_after:
            self.cancel.cancel()
        if self.cancel.cancelled:
            raise CancelledError("The comparison was cancelled.")
        if sentence := self.fails(plan, what):
            raise LoadEndedError(sentence, "does_not_fit")


class FakeWatch(Struct, dict=True):
    """Stand-in for the readings during a measurement: returns `windows` one after another, then empty ones."""

    windows: list[Window] = field(default_factory=list)

    def begin(self) -> None: ...

    def end(self) -> Window:
        return self.windows.pop(0) if self.windows else Window()


class FakePredictor(Struct, dict=True):
    """Predicts seconds by a function of the plan, and records the plans that it learns from."""

    predict: Callable[[Plan], float | None] = lambda _plan: None
    learnt: list[Plan] = field(default_factory=list)

    def answer_s(self, plan: Plan) -> float | None:
        return self.predict(plan)

    def per_second(self, plan: Plan) -> float | None:
        found = self.predict(plan)
        return None if found is None else 1 / found

    def learn(self, plan: Plan, _measured: Measured) -> None:
        self.learnt.append(plan)


def measured(name: str, rates: Sequence[float], *, against: str = "", depth: int = 0, text: str = "same") -> Measured:
    """Return a measured layout with a sample for each generation speed. Prompt speeds are ten times as high."""
    samples = tuple(
        Sample(
            round=at,
            depth=depth,
            prompt_tokens=100,
            answer_tokens=32,
            prompt_per_second=10 * rate,
            answer_per_second=rate,
            first_token_s=10 / rate,
        )
        for at, rate in enumerate(rates)
    )
    return Measured(name=name, layout={}, against=against, samples=samples, answers={"0": text})


def results_of(*layouts: Measured, model: str = "m") -> BenchResults:
    """Return results of these layouts, with their comparisons."""
    return with_comparisons(
        BenchResults(
            layerdeck="0.1",
            engine="llama-cpp-python 0",
            made_s=0,
            machine=BenchMachine("Linux x86_64", "a processor", 2, 1 << 34),
            model=BenchModel(model, "llama", 1 << 20, 4),
            preset=PRESET,
            layouts=layouts,
        )
    )


def candidate(name: str, plan: Plan) -> Candidate:
    """Return a candidate without a reason."""
    return Candidate(name, plan)

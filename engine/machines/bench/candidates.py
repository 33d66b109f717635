"""Chooses the layouts that a benchmark measures: those that the strategies find, and variants of the best layout.

A variant differs from the best layout in a single setting, such as the micro batch size.
The module also predicts the time of an answer on each layout.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

from msgspec import Struct

from engine.base.cancellation import CancelToken
from engine.base.language import tr
from engine.base.values import replace
from engine.devices.device import CPU_ID
from engine.machines.bench.results import Measured, Preset
from engine.machines.rigs.speeds import TimedAnswer, bare_speed, known_speeds, learnt
from engine.planning.fit.speed_book import SpeedBook
from engine.planning.fit.strategies.catalogue import STRATEGIES, auto_layout
from engine.planning.fit.strategies.constraints import Constraints, SearchLimit
from engine.planning.layout.layout import single_device, split_evenly
from engine.planning.memory.backends import backend_traits
from engine.planning.plan.edit import Edit
from engine.planning.plan.plan import Plan
from engine.planning.plan.preview import plan_prompt, plan_speed
from engine.planning.speed.work import TokenWork

MICRO_BATCHES = (128, 256, 1024, 2048, 4096)
BUSY_LOAD = 0.25
"""Largest share of processor time for other programs in a measurement that corrects the stored device speeds."""
OFFLOAD_BATCHES = (8, 128, 1024)
"""Values of `op_offload_min_batch` to try.

With op offload, a card computes with weights that are stored in the CPU's memory. It does so only for micro batches
that have at least `op_offload_min_batch` tokens.
"""


class Candidate(Struct, frozen=True):
    """A layout to measure in a benchmark. `name`: name in the results. `reason`: why it is tried, for people."""

    name: str
    plan: Plan
    reason: str = ""


class Predictor:
    """Predicts the time of an answer on a layout from measured speeds of devices, and corrects these speeds.

    Use it in a single thread other than the GUI thread: a prediction asks drivers for PCIe rates, which takes time.

    `book`: the measured speeds of devices.
    `preset`: lengths of the prompt and the answer to predict.
    """

    def __init__(self, book: SpeedBook, preset: Preset) -> None:
        self.book = book
        self._preset = preset

    def answer_s(self, plan: Plan) -> float | None:
        """Return the predicted seconds for a prompt and an answer of the preset's lengths; None if unknown."""
        preset, speeds, work = self._preset, known_speeds(plan.rig, self.book), TokenWork(plan.model)
        prompt = plan_prompt(work, plan, speeds, preset.prompt_tokens)
        answer = plan_speed(work, plan, speeds, preset.prompt_tokens + preset.answer_tokens // 2)
        if prompt is None or answer is None:
            return None
        return preset.prompt_tokens * prompt.token_s + preset.answer_tokens * answer.token_s

    def per_second(self, plan: Plan) -> float | None:
        """Return the predicted generation speed of an answer, in tokens per second; None if unknown.

        Prompt and answer have the preset's lengths.
        """
        fill_tokens = self._preset.prompt_tokens + self._preset.answer_tokens // 2
        found = plan_speed(TokenWork(plan.model), plan, known_speeds(plan.rig, self.book), fill_tokens)
        return None if found is None else found.tokens_per_second

    def learn(self, plan: Plan, measured: Measured) -> None:
        """Correct the measured speeds in `book` by the median speeds of a measured layout.

        `book` does not change if there are no samples, or if other programs used more than `BUSY_LOAD` of the
        processor time: predictions are for a machine on which no other program computes.
        """
        samples = [each for each in measured.samples if each.depth == 0]
        prompt, generation = measured.middle("prompt"), measured.middle("generation")
        if not samples or generation is None or (measured.other_load or 0.0) > BUSY_LOAD:
            return
        last = samples[-1]
        answer = TimedAnswer(last.prompt_tokens, last.answer_tokens, generation, last.prompt_tokens, prompt or 0.0)
        predicted = bare_speed(plan, self.book, answer)
        if predicted is not None:
            self.book = learnt(self.book, plan, predicted, answer)


def strategy_candidates(base: Plan, book: SpeedBook, cancel: CancelToken) -> tuple[Candidate, ...]:
    """Return the layouts that the strategies find with the settings of `base`, if they fit and differ from the layout
    of `base`.

    Raises:
        CancelledError: if `cancel` is cancelled.
    """
    rig, edit = base.rig, base.edit
    watch = SearchLimit(cancel)
    constraints = Constraints(side_files=edit.side_files, speeds=known_speeds(rig, book), watch=watch)
    several = len([device for device in rig.devices if device.kind != "accel"]) > 1
    # Strategy "context" is left out, because it changes the context length.
    asked: list[tuple[str, Constraints]] = [(name, constraints) for name in STRATEGIES if name != "context"]
    if several:
        asked.append(("proportional", replace(constraints, split=True)))
    known = {edit.layout}
    found = []
    for name, wanted in asked:
        result = auto_layout(name, base.memory, rig, edit.context, wanted)
        if result.fits and result.layout not in known:
            known.add(result.layout)
            label = tr("{name}, split over several devices", name=name) if wanted.split else name
            found.append(Candidate(label, base.with_layout(result.layout), result.explanation))
    return tuple(_loadable(found))


def numa_candidates(base: Plan) -> tuple[Candidate, ...]:
    """Return three plans whose speeds show whether a split by NUMA node is faster.

    The plans are: the model on the CPU alone; the same with llama.cpp's `--numa distribute`; and the layers split
    evenly over the devices of the rig.

    `base`: plan on a rig whose devices are workers bound to NUMA nodes (`numa_rig`).
    """
    n_layers, context = base.edit.layout.n_layers, base.edit.context
    alone = base.with_layout(single_device(n_layers, CPU_ID))
    spread = Edit(alone.edit.layout, replace(context, numa="distribute"), base.edit.side_files)
    nodes = base.with_layout(split_evenly(n_layers, [device.id for device in base.rig.devices]))
    return (
        Candidate("CPU", alone, tr("all layers on the CPU, without a split by NUMA node")),
        Candidate("CPU, distribute", alone.with_edit(spread), tr("threads spread over the NUMA nodes by llama.cpp")),
        Candidate(tr("NUMA nodes"), nodes, tr("each NUMA node has a worker and an equal part of the layers")),
    )


def settings_candidates(preset: Preset) -> tuple[Callable[[str, Plan], tuple[Candidate, ...]], ...]:
    """Return functions that vary one setting each: pipeline parallelism, op offload, flash attention, micro batch.

    A function takes the name and the plan of the best layout. It returns candidates with other values of the setting.

    `preset`: its prompt length is the largest useful micro batch.
    """
    return (_pipelines, _op_offloads, _flash_attentions, partial(_micro_batches, preset.prompt_tokens))


def _pipelines(name: str, plan: Plan) -> tuple[Candidate, ...]:
    devices = {device for device in plan.edit.layout.devices if device != CPU_ID}
    if len(devices) < 2 or plan.edit.layout.split_mode != "layer":
        return ()
    other = "off" if plan.settings.pipeline == "on" else "on"
    return _with(name, plan, [(tr("pipeline parallelism {mode}", mode=other), {"pipeline": other})])


def _op_offloads(name: str, plan: Plan) -> tuple[Candidate, ...]:
    """Return candidates with other values of `op_offload_min_batch`, and one without op offload.

    With op offload, a card computes with weights that are stored in the CPU's memory. Empty if no weights are on the
    CPU, or if no backend of the layout supports op offload.

    `name`: name of the layout to change; the names of the candidates begin with it.
    """
    layout, context = plan.edit.layout, plan.settings
    on_host = CPU_ID in layout.devices or any(each.device == CPU_ID for each in layout.overrides)
    used = [device for device in plan.rig.devices if device.id in layout.devices]
    if not on_host or not any(backend_traits(device).op_offload for device in used):
        return ()
    changes: list[tuple[str, dict[str, Any]]] = [
        (
            tr("op offload for batches of at least {count} tokens", count=count),
            {"op_offload": True, "op_offload_min_batch": count},
        )
        for count in OFFLOAD_BATCHES
        if not context.op_offload or count != context.offload_batch
    ]
    if context.op_offload:
        changes.append((tr("no op offload"), {"op_offload": False, "op_offload_min_batch": None}))
    return _with(name, plan, changes)


def _flash_attentions(name: str, plan: Plan) -> tuple[Candidate, ...]:
    other = "on" if plan.settings.flash_attn == "off" else "off"
    return _with(name, plan, [(tr("flash attention {mode}", mode=other), {"flash_attn": other})])


def _micro_batches(prompt_tokens: int, name: str, plan: Plan) -> tuple[Candidate, ...]:
    context = plan.settings
    # A micro batch that is longer than the prompt changes nothing.
    # Sizes above that length are all alike: of these the dict keeps the last one, which is the smallest.
    sizes = {min(size, prompt_tokens): size for size in reversed(MICRO_BATCHES)}
    sizes.pop(min(context.n_ubatch, prompt_tokens), None)
    return _with(
        name,
        plan,
        [
            # llama.cpp limits the micro batch to the batch, so the batch grows with it.
            (tr("micro batch {count}", count=size), {"n_ubatch": size, "n_batch": max(size, context.n_batch)})
            for size in sorted(sizes.values())
            if size <= context.n_ctx_each
        ],
    )


def _with(name: str, plan: Plan, changes: Sequence[tuple[str, dict[str, Any]]]) -> tuple[Candidate, ...]:
    found = []
    for words, change in changes:
        context = replace(plan.edit.context, **change)
        edit = Edit(plan.edit.layout, context, plan.edit.side_files)
        found.append(Candidate(f"{name}, {words}", plan.with_edit(edit)))
    return tuple(_loadable(found))


def _loadable(candidates: Sequence[Candidate]) -> Iterator[Candidate]:
    """Yield the candidates whose plan violates no rule and is forecast to fit."""
    yield from (each for each in candidates if not each.plan.violations and each.plan.report.fits)

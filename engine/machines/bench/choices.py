"""Finds the settings that were fastest in a benchmark, so that later loads of the model on these devices use them.

Two layouts are compared only if they were measured in turns and differ in a single setting.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import msgspec

from engine.base.values import replace
from engine.devices.device import MeasuredChoice
from engine.machines.bench.candidates import BUSY_LOAD, Candidate
from engine.machines.bench.results import BenchResults, Measured, compare
from engine.planning.fit.speed_book import machine_key
from engine.planning.plan.decisions.decision import load_key
from engine.planning.plan.plan import Plan
from engine.planning.settings.context_settings import ContextSettings

MIN_GAIN = 1.05
"""Another value of a setting is chosen only if prompts are faster by this factor.

A smaller gain is not worth the additional memory of a larger micro batch.
"""


def choices_of(results: BenchResults, candidates: Sequence[Candidate]) -> tuple[MeasuredChoice, ...]:
    """Return the values of `n_ubatch` and `op_offload_min_batch` that made the computation of prompts fastest.

    A setting is left out if only one of its values was measured.

    `candidates`: the measured layouts with their plans.
    """
    plans = {each.name: each.plan for each in candidates}
    measured = {each.name: each for each in results.layouts if each.name in plans}
    found = []
    for setting in ("n_ubatch", "op_offload_min_batch"):
        for base in measured.values():
            rivals = [
                each
                for each in measured.values()
                if each.against == base.name and _differ_in(setting, plans[base.name], plans[each.name])
            ]
            choice = _choice(setting, base, rivals, plans) if rivals else None
            if choice is not None:
                found.append(choice)
    return tuple(found)


def _differ_in(setting: str, base: Plan, other: Plan) -> bool:
    """Return whether two plans differ in the setting with the key `setting`, and in no other setting but `n_batch`."""
    # `n_batch` is ignored: a candidate with a larger micro batch also gets a larger batch, which llama.cpp requires.
    ours, theirs = (msgspec.structs.replace(each.settings, **{setting: 1, "n_batch": 1}) for each in (base, other))
    edits = base.edit, other.edit
    return (
        _value(setting, base.settings) != _value(setting, other.settings)
        and ours == theirs
        and edits[0].layout == edits[1].layout
        and edits[0].side_files == edits[1].side_files
    )


def _choice(setting: str, base: Measured, rivals: Sequence[Measured], plans: dict[str, Plan]) -> MeasuredChoice | None:
    """Return the measured choice for one setting: the value that made the computation of prompts fastest.

    None if other programs were busy, or if there are too few rounds for a comparison.

    `setting`: key of the setting.
    `base`: results of the layout to compare with.
    `rivals`: results of layouts with other values of the setting.
    `plans`: plans of the layouts by name.
    """
    plan = plans[base.name]
    value = _value(setting, plan.settings)
    machine, load = machine_key(plan.rig.host), load_key(plan.model, plan.edit.layout, plan.rig)
    found = list(_choices(setting, base, rivals, plans))
    if not found:
        return None
    best = max(found, key=lambda each: each.ratio)
    if best.ratio >= MIN_GAIN and best.low > 1:
        return replace(best, base=value, machine=machine, load=load)
    return MeasuredChoice(setting, value, value, 1.0, 1.0, 1.0, machine, load)


def _choices(
    setting: str, base: Measured, rivals: Sequence[Measured], plans: dict[str, Plan]
) -> Iterator[MeasuredChoice]:
    for rival in rivals:
        prompt, answer = compare(base, rival, "prompt"), compare(base, rival, "answer")
        busy = max(base.other_load or 0.0, rival.other_load or 0.0) > BUSY_LOAD
        if prompt is None or prompt.low is None or prompt.high is None or busy:
            continue
        # What prompts gain must not be lost by the whole answer.
        if answer is not None and answer.verdict == "slower":
            continue
        value = _value(setting, plans[rival.name].settings)
        yield MeasuredChoice(setting, value, value, prompt.ratio, prompt.low, prompt.high, "")


def _value(setting: str, settings: ContextSettings) -> int:
    return settings.n_ubatch if setting == "n_ubatch" else settings.offload_batch

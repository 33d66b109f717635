"""Real loads of automatic layouts on random lab rigs. A layout that was forecast to fit must load."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

from msgspec import Struct

from engine.base.units import MIB
from engine.base.values import replace
from engine.devices.device import Rig
from engine.machines.rigs.lab import LabRig
from engine.model.gguf.reader import read_model
from engine.planning.fit.strategies.catalogue import STRATEGIES, auto_layout
from engine.planning.fit.strategies.constraints import AutoLayout, Constraints
from engine.planning.memory.model_memory import ModelMemory
from engine.planning.settings.context_settings import ContextSettings
from engine.runtime.session.events import AnyEvent, Loaded
from engine.runtime.session.status import Phase
from tests.support.load_specs import spec_of
from tests.support.models import write_tiny_llama, write_tiny_moe
from tests.support.session_log import SessionLog


class Trial(Struct, frozen=True):
    """The automatic layout of one model by one strategy, on some workers of a lab rig."""

    strategy: str
    memory: ModelMemory
    rig: Rig
    result: AutoLayout

    def __str__(self) -> str:
        caps = ", ".join(f"{device.id} {device.total_bytes} less {device.margin_bytes}" for device in self.rig.devices)
        return f"{self.strategy} of {self.memory.model.name} on {caps}: {self.result}"


def write_models(folder: Path) -> tuple[ModelMemory, ...]:
    """Write models of 10 to 60 MB, dense and with experts."""
    dense = partial(write_tiny_llama, n_embd=256, n_head=4, n_ff=768, n_vocab=4096)
    sparse = partial(write_tiny_moe, n_embd=256, n_head=4, n_ff=768, n_vocab=4096)
    paths = (
        dense(folder / "deep.gguf", n_layers=18, n_ctx_train=8192),
        dense(folder / "tied.gguf", n_layers=7, n_ctx_train=16384, tied=True),
        dense(folder / "small.gguf", n_layers=12, n_ctx_train=4096, file_type="Q8_0"),
        sparse(folder / "mixture.gguf", n_layers=9, n_expert=8, n_ctx_train=8192),
    )
    return tuple(ModelMemory(read_model(path)) for path in paths)


def random_caps(random_numbers: random.Random) -> list[int]:
    """Return the memory caps of one to four workers, from a single layer to the whole model."""
    return [random_numbers.randint(6, 72) * MIB for _ in range(random_numbers.randint(1, 4))]


def random_trials(
    lab: Rig, models: Sequence[ModelMemory], random_numbers: random.Random, count: int
) -> Iterator[Trial]:
    """Yield `count` trials, with a random selection of workers, margins, settings and constraints."""
    for _ in range(count):
        workers = random_numbers.sample(lab.devices, random_numbers.randint(1, len(lab.devices)))
        margins = [random_numbers.choice((0, 0, random_numbers.randint(0, 8) * MIB)) for _ in workers]
        rig = Rig(
            tuple(replace(worker, margin_bytes=margin) for worker, margin in zip(workers, margins, strict=True)),
            lab.host,
        )
        context = ContextSettings(
            n_ctx=random_numbers.choice((256, 1000, 2048, 4096)),
            n_ubatch=random_numbers.choice((64, 256, 512)),
            type_k=random_numbers.choice(("f16", "q8_0")),
            type_v=random_numbers.choice(("f16", "q8_0")),
            offload_kqv=random_numbers.random() < 0.9,
            load_mode=random_numbers.choice(("auto", "none")),
        )
        constraints = Constraints(
            order=tuple(random_numbers.sample(rig.ids, len(rig.ids))), split=random_numbers.random() < 0.3
        )
        strategy = random_numbers.choice(tuple(STRATEGIES))
        memory = random_numbers.choice(models)
        yield Trial(strategy, memory, rig, auto_layout(strategy, memory, rig, context, constraints))


def load(trial: Trial) -> AnyEvent:
    """Load the layout of a trial and unload it; return the ending of the load."""
    spec = spec_of(trial.memory, trial.rig, trial.result.layout, trial.result.context)
    with SessionLog() as log:
        log.session.load(spec)
        ending = log.wait_for_endings(1)[0]
        log.session.unload()
        log.wait_until(lambda: log.session.snapshot.phase in (Phase.STOPPED, Phase.FAILED))
    return ending


class Tally(Struct):
    """Counts of all trials. `failures`: layouts that were forecast to fit but did not load."""

    loaded: int
    not_fitting: int
    failures: list[str]


def run_trials(caps: Sequence[int], models: Sequence[ModelMemory], random_numbers: random.Random, count: int) -> Tally:
    """Start a lab rig with these caps, and load each layout that is forecast to fit."""
    tally = Tally(0, 0, [])
    with LabRig(caps) as lab:
        for trial in random_trials(lab.rig, models, random_numbers, count):
            if not trial.result.fits:
                tally.not_fitting += 1
                continue
            ending = load(trial)
            if isinstance(ending, Loaded):
                tally.loaded += 1
            else:
                tally.failures.append(f"{ending}\n  {trial}")
    return tally

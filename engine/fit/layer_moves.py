"""Moving layers off a device, or their experts: which moves there are, in the order they are worth trying."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace

from engine.devices.device import CPU_ID
from engine.gguf.model_file import ModelFile
from engine.layout.engine_parameters import entry_count
from engine.layout.layout import Layout, Override, Run


@dataclass(frozen=True, slots=True)
class Move:
    """Layers at an end of a run that go to `target`: `layers(n)` are the `n` that would go first."""

    run: Run
    target: str
    from_end: bool

    def layers(self, count: int) -> tuple[int, int]:
        """Return the first and the last of `count` layers."""
        if self.from_end:
            return self.run.last - count + 1, self.run.last
        return self.run.first, self.run.first + count - 1

    def after(self, layout: Layout, count: int) -> Layout:
        """Return `layout` with `count` layers moved."""
        return layout.move_range(*self.layers(count), self.target)


def moves_off(layout: Layout, devices: Collection[str], targets: Sequence[str]) -> list[Move]:
    """Return both ends of every run of `devices` with every target (the best first), in the order they are tried.

    Neighbours come before others, the CPU last, what needs no further entry first; the output layer stays if it can.
    """
    moves: list[tuple[tuple[int, ...], Move]] = []
    runs = layout.runs
    for index, run in enumerate(runs):
        if run.device not in devices:
            continue
        for rank, target in enumerate(targets):
            for from_end in (True, False):
                neighbour = index + 1 if from_end else index - 1
                near = 0 <= neighbour < len(runs) and runs[neighbour].device == target
                move = Move(run, target, from_end)
                with_output = from_end and index == len(runs) - 1
                more = entry_count(move.after(layout, 1)) - entry_count(layout)
                order = (not near, target == CPU_ID, max(0, more), rank, with_output, -run.length, not from_end)
                moves.append((order, move))
    return [move for _, move in sorted(moves, key=lambda pair: pair[0])]


@dataclass(frozen=True, slots=True)
class ExpertMove:
    """Experts at the end of a run that go to the CPU, while attention and KV cache stay."""

    run: Run

    def layers(self, count: int) -> tuple[int, int]:
        """Return the first and the last of the `count` layers whose experts go first."""
        return self.run.last - count + 1, self.run.last

    def after(self, layout: Layout, count: int) -> Layout:
        """Return `layout` with the experts of `count` layers on the CPU."""
        first, last = self.layers(count)
        return replace(layout, overrides=(Override(CPU_ID, part="experts", first=first, last=last), *layout.overrides))


def experts_off(layout: Layout, model: ModelFile, devices: Collection[str]) -> list[ExpertMove]:
    """Return the experts of `devices` that no override has taken elsewhere, the longest rows of layers first."""
    moves = [ExpertMove(run) for device in devices if device != CPU_ID for run in _expert_runs(layout, model, device)]
    return sorted(moves, key=lambda move: (-move.run.length, move.run.first))


def _expert_runs(layout: Layout, model: ModelFile, device: str) -> Iterator[Run]:
    """Yield layers of `device` in a row whose experts are there too."""
    here: list[int] = []
    for layer, where in enumerate((*layout.assignment(), "")):
        if where == device and _has_experts(layout, model, layer):
            here.append(layer)
        elif here:
            yield Run(device, here[0], here[-1])
            here = []


def _has_experts(layout: Layout, model: ModelFile, layer: int) -> bool:
    taken = (each.part == "experts" and (each.layers is None or layer in each.layers) for each in layout.overrides)
    return model.blocks[layer].expert_bytes > 0 and not any(taken)


def pushed_to_cpu(layout: Layout, device: str, count: int) -> Layout | None:
    """Return `layout` with `count` layers less on the first run of `device` and as many more on the CPU at the front.

    The runs before it keep their lengths and take on the layers behind theirs: layers on the CPU cost least at the
    front. None where `device` has no run of so many layers.
    """
    runs = layout.runs
    place = next((index for index, run in enumerate(runs) if run.device == device), None)
    if place is None or runs[place].length < count:
        return None
    leading = runs[0].length if runs[0].device == CPU_ID else 0
    between = [run.device for run in runs[:place] for _ in range(run.length)][leading:]
    assignment = [CPU_ID] * (leading + count) + between
    pushed = layout
    for layer, target in enumerate(assignment):
        pushed = pushed.assign(layer, target) if pushed.device_of(layer) != target else pushed
    return pushed

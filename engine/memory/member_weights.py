"""What each member of a tensor split holds: its slices of weights and state, kept as sums over the layers."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import accumulate

from engine.gguf.model_file import ModelFile, TensorInfo
from engine.memory.backends import SizeRule
from engine.memory.hyper_parameters import HyperParameters
from engine.memory.kv_cache import LayerState
from engine.memory.placement import Placement
from engine.memory.tensor_split import TensorSplit
from engine.memory.weights import WeightTables

Members = tuple[int, ...]
"""Bytes of each member, in the order of the shares."""


class MemberTables:
    """Sums for one model and one list of members; make one per list and keep it while that is edited."""

    def __init__(
        self,
        model: ModelFile,
        hyper: HyperParameters,
        tables: WeightTables,
        shares: Sequence[float],
        rules: Sequence[SizeRule],
    ) -> None:
        self._split = TensorSplit(model, hyper, shares)
        self._rules = tuple(rules)
        self._last_state: tuple[Sequence[LayerState], int, tuple[Members, Members]] | None = None
        self._nothing: Members = (0,) * len(self._rules)
        names = tables.left_out(self._rules[0].kernels).names
        self._layers = self._running(
            self._sum(self._weights(t for t in tensors if t.name not in names)) for tensors in tables.block_tensors
        )
        self._ropes = self._sum(self._weights(tables.ropes))
        self._turns = tables.turns
        self._outputs = self._sum(self._weights(t for t in tables.end if t.name not in names))

    def weight_bytes(self, leading: int) -> Members:
        """Return the weights of each member when so many layers are on the CPU."""
        layers = self._between(self._layers, leading)
        ropes = self._ropes if self._turns(leading, len(self._layers) - 2) else self._nothing
        return self._sum((layers, ropes, self._outputs))

    def slices(self, tensor: TensorInfo) -> Members:
        """Return what each member has of one weight."""
        return tuple(self._split.weight_bytes(tensor, self._rules))

    def state_bytes(self, states: Sequence[LayerState], leading: int) -> tuple[Members, Members]:
        """Return KV cache and recurrent state of each member. The last answer is kept."""
        last = self._last_state
        if last is not None and last[0] is states and last[1] == leading:
            return last[2]
        kv, recurrent = [], []
        for layer, state in enumerate(states[leading:], leading):
            kv += [tuple(self._split.state_bytes(tensor, layer, self._rules)) for tensor in state.cache]
            recurrent += [tuple(self._split.state_bytes(tensor, layer, self._rules)) for tensor in state.recurrent]
        found = (self._sum(kv), self._sum(recurrent))
        self._last_state = (states, leading, found)
        return found

    def _weights(self, tensors: Iterable[TensorInfo]) -> Iterable[Members]:
        return (self.slices(tensor) for tensor in tensors)

    def _sum(self, parts: Iterable[Members]) -> Members:
        return tuple(map(sum, zip(self._nothing, *parts, strict=True)))

    def _running(self, layers: Iterable[Members]) -> tuple[Members, ...]:
        return tuple(accumulate(layers, lambda a, b: self._sum((a, b)), initial=self._nothing))

    def _between(self, sums: tuple[Members, ...], first: int) -> Members:
        return tuple(end - start for start, end in zip(sums[first], sums[-1], strict=True))


def member_rules(placement: Placement) -> tuple[SizeRule, ...] | None:
    """Return the members' rules, None where one of them is not in the rig."""
    if any(entry not in placement.traits for entry in placement.entries):
        return None
    return tuple(placement.traits[entry].size_rule for entry in placement.entries)

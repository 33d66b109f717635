"""What the engine is told of an override: the tensors that it finds in this file, by name.

llama.cpp compiles every pattern for every tensor and matches it by backtracking. Names in groups, as `part_pattern`
writes them, are short and cost it nothing, whatever the pattern was; and what is loaded is what was forecast.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable

from engine.base.errors import LayoutError
from engine.planning.layout.engine_parameters import MATCHES_NO_TENSOR, TensorOverride
from engine.planning.layout.layout import Layout
from engine.planning.layout.patterns import part_pattern, pattern_finder

MAX_NAMES_LENGTH = 32768
"""libstdc++ refuses regexes of more than 100,000 states; the patterns of whole models have some hundred characters."""

_NAME = re.compile(r"[A-Za-z0-9._/-]{1,127}", re.ASCII)
"""llama.cpp makes up its own tensor names, all of this kind; it knows no tensor with another name."""
_NUMBERED = re.compile(r"([^0-9]*)([0-9]{1,9})([^0-9].*)", re.ASCII)


def found_overrides(layout: Layout, names: Iterable[str]) -> tuple[TensorOverride, ...]:
    """Return the overrides of `layout` for a model with tensors of these `names`, in their order.

    Raises:
        LayoutError: a pattern that finds so many unlike names that the engine would refuse their list.
    """
    known = tuple(names)
    found = []
    for index, override in enumerate(layout.overrides):
        if override.pattern is None:
            pattern = part_pattern(override.part or "all", override.layers)
        else:
            finds = pattern_finder(override.pattern)
            pattern = names_pattern(name for name in known if finds(name))
            if len(pattern) > MAX_NAMES_LENGTH:
                raise LayoutError(
                    "the pattern finds too many unlike tensors of this model; use several overrides",
                    place=f"overrides[{index}].pattern",
                )
        found.append(TensorOverride(pattern, override.device))
    return tuple(found)


def names_pattern(names: Iterable[str]) -> str:
    """Return a regex that finds exactly these tensor names: those of layers by layers, alternatives only."""
    layers: defaultdict[tuple[str, str], list[str]] = defaultdict(list)
    alternatives = []
    for name in names:
        if not _NAME.fullmatch(name):
            continue
        if numbered := _NUMBERED.fullmatch(name):
            layers[numbered[1], numbered[3]].append(numbered[2])
        else:
            alternatives.append(_literal(name))
    tails: defaultdict[tuple[str, tuple[str, ...]], list[str]] = defaultdict(list)
    for (head, tail), numbers in layers.items():
        tails[head, tuple(numbers)].append(_literal(tail))
    alternatives += [
        f"{_literal(head)}({'|'.join(numbers)})({'|'.join(alike)})" for (head, numbers), alike in tails.items()
    ]
    return f"^({'|'.join(alternatives)})$" if alternatives else MATCHES_NO_TENSOR


def _literal(name: str) -> str:
    return name.replace(".", r"\.")

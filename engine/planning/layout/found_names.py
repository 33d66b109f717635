"""Translation of a layout's overrides into regexes for llama.cpp that list the matching tensors by name.

llama.cpp compiles each pattern for each tensor and matches by backtracking (`std::regex`). A list of names is quick to
match, even if the user's pattern is not. With a list, llama.cpp also moves exactly the tensors that the memory
forecast counted.
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
"""Largest length of a regex for llama.cpp, in characters. libstdc++ refuses a regex of over 100,000 states.

Regexes for whole models have some hundred characters.
"""

_NAME = re.compile(r"[A-Za-z0-9._/-]{1,127}", re.ASCII)
"""Tensor names that llama.cpp can load. A tensor with any other name is not loaded, so overrides skip it."""
_NUMBERED = re.compile(r"([^0-9]*)([0-9]{1,9})([^0-9].*)", re.ASCII)


def found_overrides(layout: Layout, names: Iterable[str]) -> tuple[TensorOverride, ...]:
    """Return the overrides of `layout`, in order, as regexes for llama.cpp, for a model with tensors of these `names`.

    Raises:
        LayoutError: a pattern matches so many different names that their list is too long for `std::regex`.
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
                    "the pattern matches too many different tensors of this model; use several overrides",
                    location=f"overrides[{index}].pattern",
                )
        found.append(TensorOverride(pattern, override.device))
    return tuple(found)


def names_pattern(names: Iterable[str]) -> str:
    r"""Return a regex that matches exactly these tensor names.

    Names that differ only in the layer number become one group, such as `blk\.(3|4)(\.ffn_up\.weight)`.
    """
    layers: defaultdict[tuple[str, str], list[str]] = defaultdict(list)
    alternatives = []
    for name in names:
        # Anything else in a name could be a regex operator, which `std::regex` would then run.
        if not _NAME.fullmatch(name):
            continue
        if numbered := _NUMBERED.fullmatch(name):
            layers[numbered[1], numbered[3]].append(numbered[2])
        else:
            alternatives.append(_literal(name))
    # Tensors that were found in the same layers share one list of layer numbers, which keeps the pattern short.
    tails: defaultdict[tuple[str, tuple[str, ...]], list[str]] = defaultdict(list)
    for (head, tail), numbers in layers.items():
        tails[head, tuple(numbers)].append(_literal(tail))
    alternatives += [
        f"{_literal(head)}({'|'.join(numbers)})({'|'.join(alike)})" for (head, numbers), alike in tails.items()
    ]
    return f"^({'|'.join(alternatives)})$" if alternatives else MATCHES_NO_TENSOR


def _literal(name: str) -> str:
    return name.replace(".", r"\.")

"""Where overrides take weights, by the names of those: each pattern is tried on the names of a model once."""

from __future__ import annotations

import re

from engine.gguf.model_file import ModelFile
from engine.layout.engine_parameters import TensorOverride

_MOST_PATTERNS = 4096


class OverrideHomes:
    """Answers for one model. Kept by pattern: the names that it finds, for layouts share most of their patterns."""

    def __init__(self, model: ModelFile) -> None:
        self._names = tuple(tensor.name for tensor in model.tensors)
        self._found: dict[str, tuple[str, ...]] = {}

    def devices(self, overrides: tuple[TensorOverride, ...]) -> dict[str, str]:
        """Return the device of each weight that overrides take somewhere: the first rule that finds it decides."""
        homes: dict[str, str] = {}
        for regex, device in reversed(usable_rules(overrides)):
            names = self._found.get(regex.pattern)
            if names is None:
                if len(self._found) >= _MOST_PATTERNS:
                    self._found.clear()
                names = self._found[regex.pattern] = tuple(name for name in self._names if regex.search(name))
            homes.update(dict.fromkeys(names, device))
        return homes


def usable_rules(overrides: tuple[TensorOverride, ...]) -> list[tuple[re.Pattern[str], str]]:
    """Return usable patterns; one that is not a regex is a broken rule and moves nothing here."""
    rules = []
    for override in overrides:
        try:
            rules.append((re.compile(override.pattern), override.device))
        except (re.error, OverflowError, RecursionError):
            continue
    return rules

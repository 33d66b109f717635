"""Where overrides take weights, by the names of those: each pattern is tried on the names of a model once."""

from __future__ import annotations

from collections.abc import Callable

from engine.gguf.model_file import ModelFile
from engine.layout.engine_parameters import TensorOverride
from engine.layout.patterns import pattern_finder

_MOST_PATTERNS = 4096


class OverrideHomes:
    """Answers for one model. Kept by pattern: the names that it finds, for layouts share most of their patterns."""

    def __init__(self, model: ModelFile) -> None:
        self._names = tuple(tensor.name for tensor in model.tensors)
        self._found: dict[str, tuple[str, ...]] = {}

    def devices(self, overrides: tuple[TensorOverride, ...]) -> dict[str, str]:
        """Return the device of each weight that overrides take somewhere: the first rule that finds it decides."""
        homes: dict[str, str] = {}
        for override in reversed(overrides):
            names = self._found.get(override.pattern)
            if names is None:
                if len(self._found) >= _MOST_PATTERNS:
                    self._found.clear()
                finds = pattern_finder(override.pattern)
                names = self._found[override.pattern] = tuple(name for name in self._names if finds(name))
            homes.update(dict.fromkeys(names, override.device))
        return homes


def usable_rules(overrides: tuple[TensorOverride, ...]) -> list[tuple[Callable[[str], bool], str]]:
    """Return what tells whether each override finds a name, with its device; a broken pattern finds none."""
    return [(pattern_finder(override.pattern), override.device) for override in overrides]

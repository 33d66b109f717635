"""What layers of one graph make once and all read, or hand on to later ones."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import fields
from typing import TypeVar

from engine.memory.compute_graph.ggml.graph import Tensor

Value = TypeVar("Value")


class Shared:
    """Values by their class: each builder module has frozen dataclasses of tensors for what its layers share.

    `of` tells values of one class apart. Sections of a graph can only share what the host fills in: see `all_inputs`.
    """

    def __init__(self) -> None:
        self._values: dict[tuple[type, object], object] = {}

    def once(self, kind: type[Value], make: Callable[[], Value], of: object = None) -> Value:
        """Return the value of a class, made for the first that asks."""
        found = self.find(kind, of)
        if found is None:
            found = make()
            self._values[kind, of] = found
        return found

    def put(self, value: object, of: object = None) -> None:
        """Keep a value, in the place of an earlier one of its class."""
        self._values[type(value), of] = value

    def find(self, kind: type[Value], of: object = None) -> Value | None:
        """Return the value of a class, None if nobody made it."""
        found = self._values.get((kind, of))
        assert found is None or isinstance(found, kind)
        return found

    def get(self, kind: type[Value], of: object = None) -> Value:
        """Return the value of a class that was made before."""
        found = self.find(kind, of)
        if found is None:
            raise LookupError(f"no layer made {kind.__name__}")
        return found

    @property
    def all_inputs(self) -> bool:
        """Whether nothing is shared but what the host fills in: layers reach no further than their neighbours."""
        return all(tensor.is_input for tensor in self._tensors())

    def _tensors(self) -> Iterator[Tensor]:
        for value in self._values.values():
            for field in fields(value):  # type: ignore[arg-type]
                found = getattr(value, field.name)
                if isinstance(found, Tensor):
                    yield found

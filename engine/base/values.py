"""What frozen `msgspec.Struct`s lack: a typed `replace`, and a field that does not count in comparisons.

`replace` returns a copy of a struct in which some fields have new values. At run time it is `msgspec.structs.replace`.
For the type checker it is `dataclasses.replace`, because mypy compares the arguments of that function with the fields
of the struct.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from msgspec import Struct, structs

if TYPE_CHECKING:
    from dataclasses import replace
else:
    from msgspec.structs import replace

__all__ = ["ComparedWithout", "replace"]


class ComparedWithout(Struct, frozen=True):
    """Base of a struct whose field with the name `not_compared` counts neither in comparisons nor in the hash."""

    not_compared: ClassVar[str]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, type(self)) and self._compared() == other._compared()

    def __hash__(self) -> int:
        return hash(self._compared())

    def _compared(self) -> tuple[object, ...]:
        return structs.astuple(structs.replace(self, **{self.not_compared: None}))

"""`replace`: returns a copy of a frozen `msgspec.Struct` in which some fields have new values.

At run time it is `msgspec.structs.replace`. For the type checker it is `dataclasses.replace`, because mypy compares
the arguments of that function with the fields of the struct.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dataclasses import replace
else:
    from msgspec.structs import replace

__all__ = ["replace"]

"""Changed copies of values.

Values are frozen `msgspec.Struct`s. At run time `replace` is `msgspec.structs.replace`. For the type checker it is
`dataclasses.replace`, whose arguments mypy compares with the fields of a struct too.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dataclasses import replace
else:
    from msgspec.structs import replace

__all__ = ["replace"]

"""Why what a server says of the newest version is not believed."""

from __future__ import annotations

from typing import Literal

from engine.errors import UnreachableError

ReleaseFault = Literal["form", "size", "slow", "signature", "expired", "clock", "older", "address"]


class ReleaseError(UnreachableError):
    """An answer that is not believed, or an address that cannot be asked; nothing follows from it."""

    def __init__(self, fault: ReleaseFault, message: str) -> None:
        super().__init__(message)
        self.fault = fault

"""How a set-up ends that cannot go on."""

from __future__ import annotations


class SetupError(Exception):
    """Set-up cannot go on; the text says why and what to do."""

    def __init__(self, message: str, exit_code: int = 2) -> None:
        super().__init__(message)
        self.exit_code = exit_code

"""The exception that ends a set-up."""

from __future__ import annotations


class SetupError(Exception):
    """The set-up cannot continue. The text names the reason and the remedy."""

    def __init__(self, message: str, exit_code: int = 2) -> None:
        super().__init__(message)
        self.exit_code = exit_code

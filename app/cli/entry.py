"""The entry point: signals first, because reading the rest of the program takes a moment in which they may come."""

from __future__ import annotations

from collections.abc import Sequence

from app.cli import exit_codes
from app.cli.interrupts import raise_on_interrupt


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code."""
    try:
        raise_on_interrupt()
        from app.cli.dispatch import run

        return run(arguments)
    except KeyboardInterrupt:
        return exit_codes.INTERRUPTED

"""`layerdeck-cli`: the headless twin of the window."""

from app.cli.entry import main

__all__ = ["main"]

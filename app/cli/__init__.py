"""`layerdeck-cli`: the command line, with the same engine as the window."""

from app.cli.entry import main

__all__ = ["main"]

"""Package of `layerdeck-cli`, the command line. It uses the same engine as the window."""

from app.cli.entry import main

__all__ = ["main"]

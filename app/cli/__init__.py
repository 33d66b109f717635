"""`layerdeck-cli`: the headless twin of the window."""

from app.cli.main import main

__all__ = ["main"]

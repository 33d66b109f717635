"""The `inspect` command: prints architecture, layers and sizes of a model."""

from __future__ import annotations

from argparse import Namespace

from app.cli import exit_codes
from app.cli.output import print_document, print_line
from engine.model.gguf.reader import read_model
from engine.planning.memory.inspect import inspect_document, inspect_text


def run_inspect(options: Namespace) -> int:
    """Print architecture, layers and sizes of a model; return the exit code."""
    document = inspect_document(read_model(options.file))
    if options.json:
        print_document(document)
    else:
        print_line(inspect_text(document))
    return exit_codes.OK

"""The `demo` command."""

from __future__ import annotations

from argparse import Namespace

from app.cli import exit_codes
from app.cli.output import print_document, print_line
from engine.demo.writer import write_demo_model


def run_demo(options: Namespace) -> int:
    """Write the demo model."""
    write_demo_model(options.path)
    if options.json:
        print_document({"path": str(options.path), "size_bytes": options.path.stat().st_size})
    else:
        print_line(f"Wrote {options.path}. Try: layerdeck-cli load {options.path} --prompt hi -n 32")
    return exit_codes.OK

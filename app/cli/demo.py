"""The `demo` command: writes a demo model."""

from __future__ import annotations

import shlex
import shutil
from argparse import Namespace
from pathlib import Path

from app.cli import exit_codes
from app.cli.output import print_document, print_line
from app.demo import fetched_demo
from engine.model.demo.place import placing
from engine.model.demo.speaking import SAMPLE_PROMPTS


def run_demo(options: Namespace) -> int:
    """Write a demo model: the trained one if it is installed, else one with random weights; return the exit code."""
    fetched = None if options.generated else fetched_demo()
    prompt = _write(options.path, fetched)
    if options.json:
        print_document({"path": str(options.path), "size_bytes": options.path.stat().st_size})
    else:
        print_line(f"Wrote {options.path}. Try: layerdeck-cli load {options.path} --prompt {shlex.quote(prompt)} -n 64")
    return exit_codes.OK


def _write(path: Path, fetched: Path | None) -> str:
    """Write the demo model to `path`, and return a prompt for it.

    `fetched`: the installed demo model, which is copied; None: a model with random weights is written.
    """
    if fetched is not None:
        # An interrupted copy leaves no incomplete model at `path`.
        with placing(path) as unfinished:
            shutil.copyfile(fetched, unfinished)
        return SAMPLE_PROMPTS[0]
    from engine.model.demo.writer import write_demo_model

    write_demo_model(path)
    return "hi"

"""Options of the `bench` command."""

from __future__ import annotations

import argparse
from argparse import Namespace
from pathlib import Path
from typing import TYPE_CHECKING

from app.cli.output import check_out
from engine.base.errors import ArgumentError
from engine.base.units import parse_count
from engine.base.values import replace

if TYPE_CHECKING:
    from engine.machines.bench.results import Preset

ALL = "all"
"""Value of --auto with which `bench` also tries automatic layouts and settings."""
FULL_DEPTH = "full"


def add_bench_arguments(command: argparse.ArgumentParser) -> None:
    """Add to the parser of `bench` the model file, --rig and the options that only `bench` has."""
    from app.cli.settings_options import positive

    command.add_argument("file", type=Path, metavar="FILE")
    command.add_argument("--rig", type=Path, metavar="R", help="rig file (default: this computer)")
    command.add_argument(
        "--layout", type=Path, action="append", default=[], metavar="L",
        help="layout file; may be repeated: the layouts are measured alternately (default: the initial layout)",
    )  # fmt: skip
    command.add_argument(
        "--numa-nodes", action="store_true",
        help="compare the CPU alone with one worker for each NUMA node, over which the layers are split evenly",
    )  # fmt: skip
    lengths = command.add_mutually_exclusive_group()
    for name, text in (
        ("quick", "prompts of 256 tokens, answers of 32, 5 rounds (the default)"),
        ("normal", "prompts of 512 tokens, answers of 128, 7 rounds"),
        ("long", "as --normal, and also with 4k, 16k and a full context before the prompt"),
    ):
        lengths.add_argument(f"--{name}", dest="preset", action="store_const", const=name, default="quick", help=text)
    command.add_argument(
        "--depth",
        type=_depths,
        metavar="N[,N...]",
        help="tokens that are already in the context before the prompt, or full",
    )
    command.add_argument(
        "--rounds", type=positive, metavar="N", help="rounds of each layout; a verdict needs at least 5"
    )
    command.add_argument("--prompt-tokens", type=positive, metavar="N", help="length of the prompts")
    command.add_argument("--answer-tokens", type=positive, metavar="N", help="length of the answers")
    command.add_argument("--csv", action="store_true", help="print a table as CSV")
    command.add_argument("--markdown", action="store_true", help="print a table as Markdown")
    command.add_argument("--out", type=Path, metavar="FILE", help="also write the results here, as JSON")
    command.add_argument(
        "--beside", type=Path, action="append", default=[], metavar="FILE",
        help="also print these saved results, even from another computer; may be repeated",
    )  # fmt: skip


def check_bench_options(options: Namespace) -> None:
    """Check the options of the command `bench` before it begins to measure.

    Raises:
        ArgumentError: options contradict each other; the message names them. Or the path of --out (the file for the
            results) is a folder, or is in a folder that does not exist.
    """
    # Before minutes of measuring.
    check_out(options.out)
    formats = [name for name in ("json", "csv", "markdown") if getattr(options, name)]
    if len(formats) > 1:
        raise ArgumentError(f"--{formats[0]} and --{formats[1]} exclude each other; remove one.")
    if options.numa_nodes and (options.layout or options.rig is not None or options.auto is not None):
        raise ArgumentError("--numa-nodes makes its own rig and layouts; remove --rig, --layout and --auto.")
    if options.auto not in (None, ALL) and options.layout:
        raise ArgumentError("--auto STRATEGY and --layout exclude each other; remove one, or use --auto all.")


def preset_of(options: Namespace) -> Preset:
    """Return the preset of --quick, --normal or --long, changed by the options for rounds, lengths and depths."""
    from engine.machines.bench.results import PRESETS

    preset = PRESETS[options.preset]
    changes = {
        "n_rounds": options.rounds,
        "prompt_tokens": options.prompt_tokens,
        "answer_tokens": options.answer_tokens,
        "depths": options.depth,
    }
    return replace(preset, **{key: value for key, value in changes.items() if value is not None})


def _depths(text: str) -> tuple[int, ...]:
    from engine.machines.bench.results import FULL

    found = []
    for part in (each.strip().casefold() for each in text.split(",")):
        if part == FULL_DEPTH:
            found.append(FULL)
            continue
        try:
            found.append(0 if part == "0" else parse_count(part))
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None
    return tuple(dict.fromkeys(found))

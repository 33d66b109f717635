"""Options of `chat`: which conversation, how it is sampled, what happens when the context is full."""

from __future__ import annotations

import argparse
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path

from engine.planning.settings.kinds import SamplingValue
from engine.planning.settings.sampling_table import SAMPLING, SamplingSetting

OVERFLOWS = ("drop", "stop", "ask")


def add_chat_arguments(command: argparse.ArgumentParser) -> None:
    """Add them, those of samplers from the table."""
    command.add_argument("--list", action="store_true", help="list the kept conversations and end")
    command.add_argument("--search", metavar="TEXT", help="list where TEXT stands in conversations and end")
    command.add_argument(
        "--conversation", metavar="ID", help="go on with this one: its id as --list shows it, or the beginning of that"
    )
    command.add_argument("--system", metavar="TEXT", help="the system prompt, from now on")
    command.add_argument("--preset", metavar="NAME", help="a preset of this name, from now on")
    command.add_argument("--prompt", metavar="TEXT", help="ask this and end; without it, lines are read")
    command.add_argument(
        "--attach",
        type=Path,
        action="append",
        default=[],
        metavar="FILE",
        help="text, code, a PDF, an image or sound; may repeat",
    )
    command.add_argument(
        "--overflow", choices=OVERFLOWS, default="drop", help="when the context is full (default drop: oldest turns)"
    )
    samplers = command.add_argument_group("samplers")
    for setting in SAMPLING:
        samplers.add_argument(
            setting.flag,
            type=_typed(setting),
            default=argparse.SUPPRESS,
            metavar="V",
            help=setting.help.replace("%", "%%"),
        )


def chosen_settings(options: Namespace) -> dict[str, object]:
    """Return what of the samplers was set."""
    given = vars(options)
    return {setting.key: given[setting.key] for setting in SAMPLING if setting.key in given}


def _typed(setting: SamplingSetting) -> Callable[[str], SamplingValue]:
    def typed(text: str) -> SamplingValue:
        try:
            return setting.kind.typed(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(f"{error}; use {setting.kind.allowed}") from None

    return typed

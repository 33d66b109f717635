"""Options of `chat`: conversation, samplers, and the behaviour when the context is full."""

from __future__ import annotations

import argparse
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path

from engine.planning.settings.kinds import SamplingValue
from engine.planning.settings.sampling_table import SAMPLING, SamplingSetting

OVERFLOWS = ("drop", "stop", "ask")


def add_chat_arguments(command: argparse.ArgumentParser) -> None:
    """Add the options of `chat`. The options for samplers are generated from the table of samplers."""
    command.add_argument("--list", action="store_true", help="list the saved conversations and exit")
    command.add_argument("--search", metavar="TEXT", help="search all conversations for TEXT and exit")
    command.add_argument(
        "--conversation", metavar="ID", help="continue the conversation with this id, or its beginning; see --list"
    )
    command.add_argument("--system", metavar="TEXT", help="system prompt from now on")
    command.add_argument("--preset", metavar="NAME", help="preset from now on")
    command.add_argument(
        "--prompt", metavar="TEXT", help="ask this and exit; without it, read questions from standard input"
    )
    command.add_argument(
        "--attach",
        type=Path,
        action="append",
        default=[],
        metavar="FILE",
        help="text, code, a PDF, an image or sound; may be repeated",
    )
    command.add_argument(
        "--tools",
        type=Path,
        metavar="FILE",
        help="tools that the model may call from now on, a JSON list in OpenAI's format; their results are read from "
        "standard input",
    )
    command.add_argument(
        "--overflow",
        choices=OVERFLOWS,
        default="drop",
        help="if the context is full (default: drop the oldest messages)",
    )
    samplers = command.add_argument_group("samplers")
    for setting in SAMPLING:
        samplers.add_argument(
            setting.flag,
            type=_typed(setting),
            # Absent if not given: no value of a setting means "not chosen".
            default=argparse.SUPPRESS,
            metavar="V",
            # argparse formats help texts with `%`.
            help=setting.help.replace("%", "%%"),
        )


def chosen_settings(options: Namespace) -> dict[str, object]:
    """Return the sampler settings that options of the command line set: a mapping from setting key to value."""
    given = vars(options)
    return {setting.key: given[setting.key] for setting in SAMPLING if setting.key in given}


def _typed(setting: SamplingSetting) -> Callable[[str], SamplingValue]:
    def typed(text: str) -> SamplingValue:
        try:
            return setting.kind.typed(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(f"{error}; use {setting.kind.allowed}") from None

    return typed

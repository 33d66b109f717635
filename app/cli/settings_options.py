"""Options of `plan` and `load` for context settings and for files that are loaded beside the model."""

from __future__ import annotations

import argparse
from argparse import Namespace
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from engine.base.errors import ArgumentError
from engine.planning.settings.context_settings import ContextSettings
from engine.planning.settings.kinds import Kind, Value, WholeNumber
from engine.planning.settings.table import MAX_SEQUENCES, SETTINGS, Setting

if TYPE_CHECKING:
    from engine.devices.device import Rig
    from engine.model.gguf.model_file import ModelFile
    from engine.planning.memory.side_files import SideFiles

_MOST_SCALE = 1000.0
_LEFT_OPEN = object()
"""Somebody says that a number is to be decided, whatever the layout file says."""


class LoraOption(NamedTuple):
    """`FILE[=SCALE]` as it was typed: a file of the whole name comes first, for names may have a = in them."""

    path: Path
    scale: float


def positive(text: str) -> int:
    """Return a whole number above 0."""
    try:
        number = int(text)
    except ValueError:
        number = 0
    if not 0 < number < 1 << 31:
        raise argparse.ArgumentTypeError(f'"{text}" is not a whole number above 0')
    return number


def add_settings_arguments(command: argparse.ArgumentParser) -> None:
    """Add the options to a command."""
    add_context_arguments(command)
    command.add_argument("--mmproj", type=Path, metavar="FILE", help="projector for images or sound")
    command.add_argument("--mmproj-device", metavar="D", help="where it runs; without it, the first card with room")
    command.add_argument(
        "--lora", type=_lora, action="append", default=[], metavar="FILE[=SCALE]", help="LoRA adapter; may repeat"
    )


def add_context_arguments(command: argparse.ArgumentParser) -> None:
    """Add those of the options that need no file."""
    for setting in SETTINGS:
        command.add_argument(
            setting.flag,
            type=_reader(setting.kind),
            metavar=setting.kind.placeholder,
            help=_help(setting),
        )
    command.add_argument(
        "--parallel", type=positive, metavar="N", help="answer N prompts at a time, with a context of --ctx for each"
    )


def context_of(options: Namespace, model: ModelFile, given: ContextSettings | None) -> ContextSettings:
    """Return the settings of a layout file, or our defaults for the model, with what the options say."""
    context = _without_layout(model, options.ctx) if given is None else given
    named = {setting.key: getattr(options, option_name(setting)) for setting in SETTINGS}
    chosen = {key: None if value is _LEFT_OPEN else value for key, value in named.items() if value is not None}
    if options.parallel is None:
        return msgspec.structs.replace(context, **chosen)
    return _parallel(options.parallel, context, chosen)


def _parallel(count: int, context: ContextSettings, chosen: Mapping[str, Value | None]) -> ContextSettings:
    """Return the settings with which each of `count` prompts at a time has the context that was asked for.

    Without one on the command line it has what each has by the layout file, or by our defaults.
    """
    if "n_seq_max" in chosen:
        raise ArgumentError(
            "--parallel and --sequences both say how many prompts run at a time; leave one of them out."
        )
    if count > MAX_SEQUENCES:
        raise ArgumentError(f"--parallel: {count} prompts at a time are too many; at most {MAX_SEQUENCES}.")
    each = chosen.get("n_ctx", context.n_ctx_each)
    assert isinstance(each, int)
    return msgspec.structs.replace(context, **{**chosen, "n_seq_max": count}).with_each(each)


def option_name(setting: Setting) -> str:
    """Return under which name the parsed options hold `setting`; None there: nobody said anything."""
    return setting.flag.removeprefix("--").replace("-", "_")


def _without_layout(model: ModelFile, n_ctx: int | None) -> ContextSettings:
    """Return what a layout file would leave at its defaults; for a model that reads whole texts what serves those."""
    from engine.planning.plan.decisions.context_length import default_context, reads_whole_texts

    if n_ctx is None and not reads_whole_texts(model):
        n_ctx = ContextSettings().n_ctx
    return default_context(model, n_ctx)


def side_files_of(options: Namespace, model: ModelFile, rig: Rig) -> SideFiles:
    """Read the headers of the files that the options name.

    Raises:
        ModelFileError: for a file that is not of its kind, or not for this model.
        ArgumentError: for a device that the rig does not have.
    """
    from engine.planning.memory.side_files import SideFiles, read_adapter, read_projector

    device = options.mmproj_device
    if device is not None and options.mmproj is None:
        raise ArgumentError("--mmproj-device says where a projector runs; name its file with --mmproj.")
    if device is not None and rig.device(device) is None:
        raise ArgumentError(f"--mmproj-device: {device} is not among the devices ({', '.join(rig.ids)}).")
    return SideFiles(
        projector=None if options.mmproj is None else read_projector(options.mmproj, device),
        adapters=tuple(read_adapter(each.path, model, each.scale) for each in options.lora),
    )


def _reader(kind: Kind) -> Callable[[str], Value | object]:
    """Return the reader of an option, whose None argparse could not tell from an option that is not there."""

    def read(text: str) -> Value | object:
        try:
            value = kind.typed(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None
        return _LEFT_OPEN if value is None else value

    return read


def _help(setting: Setting) -> str:
    words = "" if isinstance(setting.kind, WholeNumber) else f": {setting.kind.allowed}"
    return f"{setting.help}{words}"


def _lora(text: str) -> LoraOption:
    name, sign, scale_text = text.rpartition("=")
    if not sign or Path(text).exists():
        return LoraOption(Path(text), 1.0)
    try:
        scale = float(scale_text)
    except ValueError:
        scale = float("nan")
    if not -_MOST_SCALE <= scale <= _MOST_SCALE:
        raise argparse.ArgumentTypeError(f'"{scale_text}" is not a scale; use a number such as 0.5')
    return LoraOption(Path(name), scale)

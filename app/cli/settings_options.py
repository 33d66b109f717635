"""Options for context settings, projectors and LoRA adapters."""

from __future__ import annotations

import argparse
from argparse import Namespace
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from app.cli.placing_options import check_modules, find_device, placed_modules, with_placed_side_files
from engine.base.errors import ArgumentError
from engine.base.units import parse_count
from engine.base.values import replace
from engine.planning.settings.context_settings import ContextSettings
from engine.planning.settings.kinds import Kind, Value, WholeNumber
from engine.planning.settings.table import DRAFTED_TOKENS, MAX_SEQUENCES, MOST_DRAFTED, SETTINGS, Setting

if TYPE_CHECKING:
    from engine.devices.device import Rig
    from engine.model.gguf.model_file import ModelFile
    from engine.planning.layout.layout_file import LayoutFile
    from engine.planning.memory.drafts import Draft
    from engine.planning.memory.side_files import SideFiles

_MOST_SCALE = 1000.0
_NO_DRAFT = "none"
# Marks a number as left open by the user, whatever the layout file has.
_LEFT_OPEN = object()


class LoraOption(NamedTuple):
    """A parsed `FILE[=SCALE]` of --lora. If the whole text is the path of an existing file, there is no scale."""

    path: Path
    scale: float


def positive(text: str) -> int:
    """Return the number that `text` states, a whole number above 0 such as "512" or "8k" (8192)."""
    try:
        number = parse_count(text)
    except ValueError:
        number = 0
    # llama.cpp has these numbers in 32 bits.
    if not 0 < number < 1 << 31:
        raise argparse.ArgumentTypeError(f'"{text}" is not a whole number above 0')
    return number


def port_number(text: str, least: int = 1) -> int:
    """Return the TCP port that `text` states. `least`: smallest port; 0 if the system may choose the port."""
    # `isdigit` is true of superscripts and digits of other scripts, too.
    if not text.isascii() or not text.isdigit() or not least <= int(text) < 1 << 16:
        raise argparse.ArgumentTypeError(f'"{text}" is not a port; use a number from {least} to 65535')
    return int(text)


def add_settings_arguments(command: argparse.ArgumentParser) -> None:
    """Add the options of context settings, projector and LoRA adapters."""
    add_context_arguments(command)
    command.add_argument("--mmproj", type=Path, metavar="FILE", help="projector for images or sound")
    command.add_argument(
        "--mmproj-device", metavar="D", help="device of the projector (default: the first GPU with room)"
    )
    command.add_argument(
        "--draft",
        type=_draft,
        metavar="FILE|ngram|mtp|none",
        help="draft tokens: a small model with the same vocabulary",
    )
    command.add_argument(
        "--draft-tokens",
        type=positive,
        metavar="N",
        help=f"maximum number of tokens in a draft (default {DRAFTED_TOKENS})",
    )
    command.add_argument(
        "--draft-device", metavar="ID[,ID...]", help="devices of the draft model (default: the first card with room)"
    )
    command.add_argument(
        "--lora", type=_lora, action="append", default=[], metavar="FILE[=SCALE]", help="LoRA adapter; may be repeated"
    )


def add_context_arguments(command: argparse.ArgumentParser) -> None:
    """Add the options of context settings, and --parallel."""
    for setting in SETTINGS:
        command.add_argument(
            setting.flag,
            type=_reader(setting.kind),
            metavar=setting.kind.placeholder,
            help=_help(setting),
        )
    command.add_argument(
        "--parallel", type=positive, metavar="N", help="answer N prompts at a time, each with a context of --ctx"
    )


def context_of(options: Namespace, model: ModelFile, given: ContextSettings | None) -> ContextSettings:
    """Return the context settings of a load. Options replace values of `given`, or else of the model's defaults.

    `given`: the settings of the layout file; None if there is no file.
    """
    context = _without_layout(model, options.ctx) if given is None else given
    named = {setting.key: getattr(options, option_name(setting)) for setting in SETTINGS}
    chosen = {key: None if value is _LEFT_OPEN else value for key, value in named.items() if value is not None}
    if options.parallel is None:
        return msgspec.structs.replace(context, **chosen)
    return _parallel(options.parallel, context, chosen)


def _parallel(count: int, context: ContextSettings, chosen: Mapping[str, Value | None]) -> ContextSettings:
    """Return context settings for `count` parallel prompts: each of them has the context size of --ctx.

    If --ctx is not given, each has the context size in `context`.

    `context`: settings of the layout file, or the defaults. `chosen`: settings that the options set, by key.
    """
    if "n_seq_max" in chosen:
        raise ArgumentError("--parallel and --sequences exclude each other; remove one.")
    if count > MAX_SEQUENCES:
        raise ArgumentError(f"--parallel: {count} prompts at a time are too many; the limit is {MAX_SEQUENCES}.")
    each = chosen.get("n_ctx", context.n_ctx_each)
    assert isinstance(each, int)
    return msgspec.structs.replace(context, **{**chosen, "n_seq_max": count}).with_each(each)


def option_name(setting: Setting) -> str:
    """Return the name of the attribute that has the value of `setting` in the parsed options.

    The value of the attribute is None if the option was not given.
    """
    return setting.flag.removeprefix("--").replace("-", "_")


def _without_layout(model: ModelFile, n_ctx: int | None) -> ContextSettings:
    """Return the default settings for a model without a layout file.

    Encoders and embedding models, which read a whole text at once, have other defaults.

    `n_ctx`: context size of the option --ctx; None if it is not given.
    """
    # Imported late: help needs only the table of settings.
    from engine.planning.plan.decisions.context_length import default_context, reads_whole_texts

    if n_ctx is None and not reads_whole_texts(model):
        n_ctx = ContextSettings().n_ctx
    return default_context(model, n_ctx)


def side_files_of(options: Namespace, model: ModelFile, rig: Rig, given: LayoutFile | None = None) -> SideFiles:
    """Return the projector, the LoRA adapters and the draft that the options name; only their headers are read.

    `given`: the layout file, whose draft is used if the options name none; None if there is no file.

    Raises:
        ModelFileError: if a file is of another kind, or does not match the model.
        ArgumentError: if the rig lacks a device, or the model lacks a module of --place.
    """
    from engine.planning.memory.side_files import SideFiles, read_adapter, read_projector

    placed = placed_modules(options, rig)
    draft = _draft_of(options, model, rig, placed, given)
    check_modules(
        placed,
        model,
        has_projector=options.mmproj is not None,
        has_draft=draft is not None and draft.model is not None,
    )
    device = options.mmproj_device
    if device is not None and placed.get("mmproj", device) != device:
        raise ArgumentError(f"--mmproj-device {device} contradicts --place mmproj={placed['mmproj']}; remove one.")
    device = placed.get("mmproj", device)
    if device is not None and options.mmproj is None:
        raise ArgumentError("--mmproj-device needs a projector; name its file with --mmproj.")
    if device is not None and rig.device(device) is None:
        raise ArgumentError(f"--mmproj-device: {device} is not among the devices ({', '.join(rig.ids)}).")
    found = SideFiles(
        projector=None if options.mmproj is None else read_projector(options.mmproj, device),
        adapters=tuple(read_adapter(each.path, model, each.scale) for each in options.lora),
        draft=draft,
    )
    return with_placed_side_files(found, options, rig)


def _draft_of(
    options: Namespace, model: ModelFile, rig: Rig, placed: Mapping[str, str], given: LayoutFile | None
) -> Draft | None:
    """Return the draft: the way in which speculative decoding guesses tokens, for instance with a small draft model.

    --draft decides. If it is not given, the layout file decides. None: there is no draft.

    `placed`: device id of each module (such as the draft model) that the option --place names.
    `given`: content of the layout file; None: no layout file is given.

    Raises:
        ModelFileError: the draft model cannot guess tokens for `model`.
        ArgumentError: an option needs a draft or a draft model, but none is named. Or an option has a wrong value, such
            as an unknown device, or contradicts --place.
    """
    from engine.planning.layout.layout import split_evenly
    from engine.planning.memory.drafts import Draft, draft_of_file, read_draft

    asked: Path | str | None = options.draft
    draft: Draft | None
    if asked is None:
        folder = Path() if options.layout is None else options.layout.parent
        draft = draft_of_file(None if given is None else given.draft, model, folder)
    elif isinstance(asked, Path):
        draft = read_draft(asked, model)
    else:
        draft = None if asked == _NO_DRAFT else Draft("ngram" if asked == "ngram" else "mtp")
    tokens, devices = options.draft_tokens, options.draft_device
    if tokens is not None:
        if draft is None:
            raise ArgumentError("--draft-tokens needs a draft; name one with --draft.")
        if tokens > MOST_DRAFTED:
            raise ArgumentError(f"--draft-tokens: {tokens} are too many; draft {MOST_DRAFTED} at most.")
        draft = replace(draft, n_tokens=tokens)
    names = [] if devices is None else [find_device(each.strip(), rig, "--draft-device") for each in devices.split(",")]
    if "draft" in placed:
        if names and names != [placed["draft"]]:
            raise ArgumentError(f"--draft-device {devices} contradicts --place draft={placed['draft']}; remove one.")
        names = [placed["draft"]]
    if not names or draft is None or draft.model is None:
        if devices is not None:
            raise ArgumentError("--draft-device needs a draft model; name its file with --draft.")
        return draft
    if len(set(names)) < len(names):
        raise ArgumentError("--draft-device: a device is in the list twice; list it once.")
    if len(names) > draft.model.n_layers:
        raise ArgumentError(f"--draft-device: the draft has {draft.model.n_layers} layers; name fewer devices.")
    return replace(draft, layout=split_evenly(draft.model.n_layers, names))


def _draft(text: str) -> Path | str:
    return text if text in (_NO_DRAFT, "ngram", "mtp") else Path(text)


def _reader(kind: Kind) -> Callable[[str], Value | object]:
    """Return the function with which argparse converts the text of a setting.

    For "auto" and other texts that leave the value open, the function returns `_LEFT_OPEN`. It cannot return None: in
    the parsed options, None means that the option is not given.
    """

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
        # NaN fails every comparison, so the text is refused below.
        scale = float("nan")
    if not -_MOST_SCALE <= scale <= _MOST_SCALE:
        raise argparse.ArgumentTypeError(f'"{scale_text}" is not a scale; use a number such as 0.5')
    return LoraOption(Path(name), scale)

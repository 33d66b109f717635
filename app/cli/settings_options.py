"""Options of `plan` and `load` for context settings and for files that are loaded beside the model."""

from __future__ import annotations

import argparse
from argparse import Namespace
from pathlib import Path
from typing import NamedTuple

import msgspec

from engine.devices.device import Rig
from engine.errors import ArgumentError
from engine.fit.decisions.defaults import default_context, reads_whole_texts
from engine.gguf.model_file import ModelFile
from engine.layout.context_settings import (
    AUTO,
    AUTO_CONTEXT,
    FLASH_ATTENTION_MODES,
    KV_TYPES,
    LOAD_MODES,
    ContextSettings,
    OpOffload,
)
from engine.layout.layout_file import MAX_THREADS
from engine.memory.side_files import SideFiles, read_adapter, read_projector

_OFFLOAD_CHOICES: dict[str, OpOffload] = {AUTO: AUTO, "on": True, "off": False}
_MOST_SCALE = 1000.0


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
    command.add_argument("--ctx", type=_context_length, metavar="N", help="context length in tokens, or auto")
    command.add_argument("--type-k", choices=KV_TYPES, metavar="T", help="type of the K cache: " + ", ".join(KV_TYPES))
    command.add_argument("--type-v", choices=KV_TYPES, metavar="T", help="type of the V cache")
    command.add_argument("--ubatch", type=positive, metavar="N", help="physical batch in tokens")
    command.add_argument(
        "--flash-attn", choices=FLASH_ATTENTION_MODES, metavar="M", help=", ".join(FLASH_ATTENTION_MODES)
    )
    command.add_argument(
        "--load-mode", choices=LOAD_MODES, metavar="M", help="how the file is read: " + ", ".join(LOAD_MODES)
    )
    command.add_argument("--threads", type=_threads, metavar="N", help="threads for answers")
    command.add_argument("--threads-batch", type=_threads, metavar="N", help="threads for prompts")
    command.add_argument(
        "--op-offload",
        choices=tuple(_OFFLOAD_CHOICES),
        metavar="M",
        help="devices compute large batches with CPU weights: " + ", ".join(_OFFLOAD_CHOICES),
    )
    command.add_argument(
        "--op-offload-min-batch", type=positive, metavar="N", help="from how many tokens on they do (the engine: 32)"
    )
    command.add_argument("--mmproj", type=Path, metavar="FILE", help="projector for images or sound")
    command.add_argument("--mmproj-device", metavar="D", help="where it runs; without it, the first card with room")
    command.add_argument(
        "--lora", type=_lora, action="append", default=[], metavar="FILE[=SCALE]", help="LoRA adapter; may repeat"
    )


def context_of(options: Namespace, model: ModelFile, given: ContextSettings | None) -> ContextSettings:
    """Return the settings of a layout file, or our defaults for the model, with what the options say."""
    context = _without_layout(model, options.ctx) if given is None else given
    chosen = {
        "n_ctx": options.ctx,
        "type_k": options.type_k,
        "type_v": options.type_v,
        "n_ubatch": options.ubatch,
        "flash_attn": options.flash_attn,
        "load_mode": options.load_mode,
        "threads": options.threads,
        "threads_batch": options.threads_batch,
        "op_offload": None if options.op_offload is None else _OFFLOAD_CHOICES[options.op_offload],
        "op_offload_min_batch": options.op_offload_min_batch,
    }
    return msgspec.structs.replace(context, **{key: value for key, value in chosen.items() if value is not None})


def _without_layout(model: ModelFile, n_ctx: int | None) -> ContextSettings:
    """Return what a layout file would leave at its defaults; for a model that reads whole texts what serves those."""
    if n_ctx is None and not reads_whole_texts(model):
        n_ctx = ContextSettings().n_ctx
    return default_context(model, n_ctx)


def side_files_of(options: Namespace, model: ModelFile, rig: Rig) -> SideFiles:
    """Read the headers of the files that the options name.

    Raises:
        ModelFileError: for a file that is not of its kind, or not for this model.
        ArgumentError: for a device that the rig does not have.
    """
    device = options.mmproj_device
    if device is not None and options.mmproj is None:
        raise ArgumentError("--mmproj-device says where a projector runs; name its file with --mmproj.")
    if device is not None and rig.device(device) is None:
        raise ArgumentError(f"--mmproj-device: {device} is not among the devices ({', '.join(rig.ids)}).")
    return SideFiles(
        projector=None if options.mmproj is None else read_projector(options.mmproj, device),
        adapters=tuple(read_adapter(each.path, model, each.scale) for each in options.lora),
    )


def _context_length(text: str) -> int:
    return AUTO_CONTEXT if text == AUTO else positive(text)


def _threads(text: str) -> int:
    number = positive(text)
    if number > MAX_THREADS:
        raise argparse.ArgumentTypeError(f"{number} threads are too many; the engine takes up to {MAX_THREADS}")
    return number


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

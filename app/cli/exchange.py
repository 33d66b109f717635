"""The `export` and `import` commands: convert layouts to and from commands and files of other programs."""

from __future__ import annotations

import os
import sys
from argparse import Namespace
from pathlib import Path
from typing import get_args

from app.cli import exit_codes
from app.cli.inputs import read_inputs, this_machine
from app.cli.output import check_text, print_document, print_stderr, print_text
from engine.base.errors import ArgumentError
from engine.base.files import read_at_most, write_whole
from engine.base.texts import escape, show
from engine.devices.rig_file import read_rig
from engine.model.gguf.reader import read_model
from engine.planning.exchange.exporting import Target, export_plan
from engine.planning.exchange.foreign_load import ForeignLoad
from engine.planning.exchange.importing import MAX_TEXT, arrange, read_foreign
from engine.planning.layout.layout_file import LayoutFile, encode_layout, layout_document, write_layout

# A character has at most four bytes.
_MAX_BYTES = 4 * MAX_TEXT


def run_export(options: Namespace) -> int:
    """Print a plan as a command or file of another program; notes go to standard error. Return the exit code."""
    asked = read_inputs(options)
    target: Target = next(each for each in get_args(Target) if each == options.to)
    found = export_plan(asked.plan, target)
    if options.out is not None:
        _write(options.out, found.text)
    if options.json:
        print_document({"target": target, "file_name": found.file_name, "text": found.text, "notes": list(found.notes)})
        return exit_codes.OK
    if options.out is None:
        # Names of files may steer a terminal; a file gets the exact text.
        print_text(escape(found.text, keep_lines=True) if sys.stdout.isatty() else found.text)
    _print_notes(found.notes)
    return exit_codes.OK


def run_import(options: Namespace) -> int:
    """Print the layout file made of another program's command or file; notes go to standard error.

    Return the exit code.
    """
    load = read_foreign(_text_of(options), options.source, options.name)
    model = read_model(_model_of(options, load))
    rig = read_rig(options.rig) if options.rig is not None else this_machine()
    found = arrange(load, model, rig)
    file = LayoutFile(model.name, found.layout, found.context, found.draft)
    if options.out is not None:
        write_layout(options.out, file)
    if options.json:
        print_document(
            {
                "model": str(model.paths[0]),
                "layout": layout_document(file),
                "mmproj": found.projector or None,
                "mmproj_device": found.projector_device,
                "lora": [{"path": path, "scale": scale} for path, scale in found.adapters],
                "notes": list(found.notes),
            }
        )
        return exit_codes.OK
    if options.out is None:
        print_text(encode_layout(file).decode())
    _print_notes((*found.notes, *_side_file_notes(found.projector, found.projector_device, found.adapters)))
    return exit_codes.OK


def _side_file_notes(projector: str, device: str | None, adapters: tuple[tuple[str, float], ...]) -> list[str]:
    """Return a note with the options that pass an imported projector and adapters to `plan` and `load`.

    A layout file cannot contain these files. The result is a list of one sentence, or an empty list if there are none.
    `device`: device of the projector. `adapters`: path and scale of each adapter.
    """
    words = [f"--mmproj {projector}"] if projector else []
    words += [f"--mmproj-device {device}"] if projector and device else []
    words += [f"--lora {path}={scale:g}" for path, scale in adapters]
    return [f"A layout file cannot name these files; pass them to plan and load: {' '.join(words)}"] if words else []


def _print_notes(notes: tuple[str, ...]) -> None:
    for note in notes:
        print_stderr(f"note: {note}")


def _model_of(options: Namespace, load: ForeignLoad) -> Path:
    """Return the model file for an import: the file of --model, or the file that the imported text names (`load`)."""
    if options.model is not None:
        return Path(options.model)
    if not load.model:
        raise ArgumentError("The text names no model file; name it with --model.")
    # Functions of `os.path`: those of `Path` raise for an unknown user and for a path that is too long.
    path = Path(os.path.expanduser(load.model))  # noqa: PTH111
    if not os.path.isfile(path):  # noqa: PTH113
        raise ArgumentError(f"There is no file {show(load.model, 200)}; name the model's file with --model.")
    return path


def _text_of(options: Namespace) -> str:
    if (options.file is None) == (options.text is None):
        raise ArgumentError('Name a file, "-" for standard input, or give the text with --text.')
    if options.text is not None:
        check_text(options.text, "The text")
        return str(options.text)
    try:
        if str(options.file) == "-":
            data = sys.stdin.buffer.read(_MAX_BYTES + 1)
        else:
            data = read_at_most(options.file, _MAX_BYTES)
    except (OSError, ValueError) as error:
        raise ArgumentError(f"{options.file} cannot be read: {error}.") from None
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError:
        raise ArgumentError(f"{options.file} is not UTF-8 text.") from None


def _write(path: Path, text: str) -> None:
    try:
        write_whole(path, text.encode())
    except (OSError, ValueError) as error:
        raise ArgumentError(f"{path} cannot be written: {error}.") from None

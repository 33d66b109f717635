"""The layout file (`docs/contract.md`): JSON with model name, device of each layer, and context settings."""

from __future__ import annotations

import re
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Literal, get_args

from msgspec import Struct

from engine.base.errors import LayoutError
from engine.base.json_file import JsonObject, encode_document, parse_document, read_file, write_file
from engine.base.language import tr
from engine.base.values import replace
from engine.devices.device import Rig, find_id_error
from engine.devices.rig_file import rig_document, rig_of
from engine.planning.layout.layout import (
    MAX_LAYERS,
    SPLIT_MODES,
    Layout,
    Override,
    Run,
    SplitMode,
    check_cover,
    merge_runs,
    range_text,
)
from engine.planning.layout.patterns import OVERRIDE_PARTS
from engine.planning.settings.context_settings import AUTO_CONTEXT, ContextSettings
from engine.planning.settings.table import DRAFTED_TOKENS, MOST_DRAFTED, context_document, parse_context

VERSION = 1

_LAYERS = re.compile(r"(\d{1,6})(?:-(\d{1,6}))?", re.ASCII)


DraftKind = Literal["ngram", "model", "mtp"]
DRAFT_KINDS: tuple[DraftKind, ...] = get_args(DraftKind)
DRAFT_SETTINGS = ("n_ctx", "type_k", "type_v", "flash_attn", "offload_kqv", "swa_full")
"""Context settings of the draft model that a layout file contains in addition to those of the main model.

In all other settings the draft model follows the main model.
"""
FOLLOWING = ContextSettings(n_ctx=AUTO_CONTEXT)
"""Settings of a draft model whose context is as long as that of the main model."""


class DraftEntry(Struct, frozen=True):
    """The key `draft` of a layout file: the source of drafted tokens for speculative decoding.

    `kind`: "ngram" (repeats of the text itself), "model" (a draft model) or "mtp" (MTP heads of the main model).
    `model`: path or file name of the draft model; empty for other kinds.
    `n_tokens`: largest number of tokens that are drafted for one step.
    `layout`: devices of the draft model; None if the program chooses one device.
    `context`: the draft model's own settings (`DRAFT_SETTINGS`).
    """

    kind: DraftKind
    model: str = ""
    n_tokens: int = DRAFTED_TOKENS
    layout: Layout | None = None
    context: ContextSettings = FOLLOWING


class LayoutFile(Struct, frozen=True):
    """The content of a layout file.

    `model_name`: name of the model, for the user only. The layout fits any model with the same number of layers.
    `draft`: draft model or other source of drafted tokens; None if the file has none.
    `rig`: the devices for which the layout was made; None if the file does not have them.
    """

    model_name: str
    layout: Layout
    context: ContextSettings
    draft: DraftEntry | None = None
    rig: Rig | None = None


def parse_layout(data: bytes | str, *, source: str = "", n_layers: int | None = None) -> LayoutFile:
    """Return the parsed content of a layout file.

    `source`: name of the file for error messages.
    `n_layers`: number of layers of the open model, which the file must match; None if no model is open.

    Raises:
        LayoutError: the file is invalid; the message begins with `source` and names the location of the fault.
    """
    root = parse_document(data, what="layout", source=source, version=VERSION, fail=LayoutError)
    try:
        return _parse_root(root, n_layers)
    except LayoutError as error:
        # Errors of the JSON reader already name the file.
        if error.source or not source:
            raise
        raise LayoutError(error.reason, location=error.location, source=source) from error


def read_layout(path: Path, *, n_layers: int | None = None) -> LayoutFile:
    """Read the layout file at `path` and return its content.

    `n_layers`: number of layers of the open model, which the file must match; None if no model is open.

    Raises:
        LayoutError: the file cannot be read, or it is invalid.
    """
    data = read_file(path, what="layout", fail=LayoutError)
    return parse_layout(data, source=path.name, n_layers=n_layers)


def layout_document(file: LayoutFile) -> dict[str, object]:
    """Return the layout file as a JSON document.

    Shares and main device are left out if the split mode does not have them.
    """
    layout = file.layout
    document: dict[str, object] = {
        "version": VERSION,
        "model": {"name": file.model_name, "layers": layout.n_layers},
        **_layout_document(layout),
        "context": context_document(file.context),
    }
    if file.draft is not None:
        document["draft"] = _draft_document(file.draft)
    if file.rig is not None:
        document["rig"] = rig_document(file.rig)
    return document


def _layout_document(layout: Layout) -> dict[str, object]:
    document: dict[str, object] = {
        "split_mode": layout.split_mode,
        "runs": [{"device": run.device, "layers": range_text(run.first, run.last)} for run in layout.runs],
        "output": layout.output_device,
    }
    if layout.tensor_split:
        document["tensor_split"] = dict(layout.tensor_split)
    if layout.main_device is not None:
        document["main_device"] = layout.main_device
    document["overrides"] = [_override_document(override) for override in layout.overrides]
    return document


def _draft_document(draft: DraftEntry) -> dict[str, object]:
    document: dict[str, object] = {"kind": draft.kind, "tokens": draft.n_tokens}
    if draft.model:
        document["model"] = draft.model
    if draft.layout is not None:
        document["layout"] = _layout_document(draft.layout)
    if draft.context != FOLLOWING:
        written = context_document(draft.context)
        document["context"] = {key: written[key] for key in DRAFT_SETTINGS if key in written}
    return document


def encode_layout(file: LayoutFile) -> bytes:
    """Return the layout file as JSON bytes."""
    return encode_document(layout_document(file))


def write_layout(path: Path, file: LayoutFile) -> None:
    """Write a layout file. The write is atomic: a reader finds the old file or the new one."""
    write_file(path, encode_layout(file), what="layout", fail=LayoutError)


def free_name(name: str, taken: Iterable[str]) -> str:
    """Return a name for a layout: `name`, with a number appended if `taken` contains the name."""
    known = set(taken)
    numbered = (name if number == 1 else f"{name} {number}" for number in range(1, len(known) + 2))
    return next(each for each in numbered if each not in known)


def _parse_model(root: JsonObject, key: str) -> tuple[str, int | None]:
    model = root.nested(key)
    model.allow("name", "layers")
    return model.maybe("name", model.text, ""), model.maybe("layers", lambda k: model.integer(k, 1, MAX_LAYERS), None)


def _parse_root(root: JsonObject, n_layers: int | None) -> LayoutFile:
    root.allow("version", "model", *_LAYOUT_KEYS, "context", "draft", "rig")
    name, layers_in_file = root.maybe("model", partial(_parse_model, root), ("", None))
    if n_layers is not None and layers_in_file not in (None, n_layers):
        root.refuse(
            tr(
                "the layout is for a model of {layers_in_file} layers, but this model has {n_layers}",
                layers_in_file=layers_in_file,
                n_layers=n_layers,
            ),
            "model.layers",
        )
    layout = _parse_layout(root, n_layers or layers_in_file)
    context = parse_context(root.nested("context")) if "context" in root.keys else ContextSettings()
    draft = root.nullable("draft", partial(_parse_draft, root), None)
    rig = rig_of(root.nested("rig")) if "rig" in root.keys else None
    return LayoutFile(name, layout, context, draft, rig)


_LAYOUT_KEYS = ("split_mode", "runs", "output", "tensor_split", "main_device", "overrides")


def encode_draft(draft: DraftEntry) -> str:
    """Return the source of drafted tokens as JSON text, with the same keys as in a layout file."""
    return encode_document({"version": VERSION, "draft": _draft_document(draft)}).decode()


def decode_draft(text: str) -> DraftEntry:
    """Return the source of drafted tokens from a JSON text of `encode_draft`. Raises `LayoutError` for other texts."""
    root = parse_document(text, what="draft", source="", version=VERSION, fail=LayoutError)
    return _parse_draft(root, "draft")


def _parse_draft(root: JsonObject, key: str) -> DraftEntry:
    item = root.nested(key)
    item.allow("kind", "model", "tokens", "layout", "context")
    kind: DraftKind = item.choice("kind", DRAFT_KINDS)
    if kind != "model":
        for each in ("model", "layout", "context"):
            if each in item.keys:
                item.refuse(tr("only a draft of kind {kind} has this key; remove the key", kind="model"), each)
    context = FOLLOWING
    if "context" in item.keys:
        settings = item.nested("context")
        settings.allow(*DRAFT_SETTINGS)
        context = parse_context(settings)
        if "n_ctx" not in settings.keys:
            context = replace(context, n_ctx=AUTO_CONTEXT)
    layout = None
    if "layout" in item.keys:
        entry = item.nested("layout")
        entry.allow(*_LAYOUT_KEYS)
        layout = _parse_layout(entry, None)
    tokens = item.maybe("tokens", lambda each: item.integer(each, 1, MOST_DRAFTED), DRAFTED_TOKENS)
    return DraftEntry(kind, item.text("model") if kind == "model" else "", tokens, layout, context)


def _parse_layout(root: JsonObject, n_layers: int | None) -> Layout:
    """Return the layout that a JSON object describes.

    `n_layers`: number of layers of the model; None: the last layer in `runs` (the ranges of layers) determines it.
    """
    runs = tuple(_parse_run(item) for item in root.nested_list("runs"))
    # Files written by hand may have no `model`: then the model's own layer count is used, else that of the runs.
    n_layers = n_layers or (runs[-1].last + 1 if runs else 1)
    # Checked before runs are merged, so that an error names a run by its number in the file.
    check_cover(n_layers, runs)
    mode: SplitMode = root.maybe("split_mode", lambda key: root.choice(key, SPLIT_MODES), "layer")
    if mode in ("layer", "none") and "tensor_split" in root.keys:
        root.refuse(
            tr("shares belong to split modes tensor and row, not to split mode {mode}", mode=mode), "tensor_split"
        )
    return Layout(
        n_layers=n_layers,
        runs=merge_runs(runs),
        output_device=root.maybe("output", partial(_device, root), runs[-1].device),
        split_mode=mode,
        tensor_split=root.maybe("tensor_split", partial(_parse_shares, root), ()),
        main_device=root.nullable("main_device", partial(_device, root), None),
        overrides=root.maybe("overrides", lambda key: tuple(map(_parse_override, root.nested_list(key))), ()),
    )


def _parse_run(item: JsonObject) -> Run:
    item.allow("device", "layers")
    first, last = _parse_range(item, "layers")
    return Run(_device(item, "device"), first, last)


def _parse_range(item: JsonObject, key: str) -> tuple[int, int]:
    text = item.text(key)
    match = _LAYERS.fullmatch(text)
    if match is None:
        item.refuse(tr('layers are written as "5" or "0-15", counted from 0'), key)
    first, last = int(match[1]), int(match[2] or match[1])
    if last < first:
        item.refuse(tr("layers {first}-{last} are in reverse order; write {last}-{first}", first=first, last=last), key)
    return first, last


def _device(item: JsonObject, key: str) -> str:
    device = item.text(key)
    fault = find_id_error(device)
    if fault:
        item.refuse(fault, key)
    return device


def _parse_shares(root: JsonObject, key: str) -> tuple[tuple[str, float], ...]:
    shares = root.nested(key)
    for device in shares.keys:
        fault = find_id_error(device)
        if fault:
            root.refuse(fault, key)
    return tuple((device, shares.number(device)) for device in shares.keys)


def _parse_override(item: JsonObject) -> Override:
    item.allow("part", "layers", "pattern", "device")
    first, last = item.maybe("layers", partial(_parse_range, item), (None, None))
    return Override(
        device=_device(item, "device"),
        part=item.maybe("part", lambda key: item.choice(key, OVERRIDE_PARTS), None),
        first=first,
        last=last,
        pattern=item.maybe("pattern", item.text, None),
    )


def _override_document(override: Override) -> dict[str, object]:
    document: dict[str, object] = {}
    if override.part is not None:
        document["part"] = override.part
    if override.pattern is not None:
        document["pattern"] = override.pattern
    if override.first is not None and override.last is not None:
        document["layers"] = range_text(override.first, override.last)
    return {**document, "device": override.device}

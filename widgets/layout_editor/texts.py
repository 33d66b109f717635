"""The words of the editor: lane labels, state, tooltips, and the summary that screen readers get."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from enum import StrEnum

from engine.devices.device import Holding
from engine.layout.layout import Layout
from engine.plan.preview import LayerBytes, LoadedLayout, Preview
from engine.plan.report import DeviceRow
from engine.units import format_bytes
from widgets.common.memory_bar import available_bytes, bar_of_row, room_text, shortfall_within
from widgets.layout_editor.focus import BoundaryFocus, Focus, LayerFocus, OutputFocus
from widgets.layout_editor.moves import Selection
from widgets.layout_editor.placement import LaneContent


class EditState(StrEnum):
    """How the layout in the editor stands to what is loaded; the value is what people read."""

    NOT_LOADED = "not loaded"
    LOADED = "loaded"
    EDITED = "edited, not loaded"


def edit_state(preview: Preview, loaded: LoadedLayout | None) -> EditState:
    """Return whether what is edited is what is loaded, side files included."""
    if loaded is None:
        return EditState.NOT_LOADED
    return EditState.LOADED if loaded.edit == preview.edit else EditState.EDITED


def range_text(first: int, last: int) -> str:
    """Return "5" or "5–9"."""
    return str(first) if first == last else f"{first}–{last}"


def layers_text(first: int, last: int) -> str:
    """Return "layer 5" or "layers 5–9"."""
    return f"layer {first}" if first == last else f"layers {first}–{last}"


def ranges_text(ranges: Iterable[tuple[int, int]]) -> str:
    """Return "layer 5" or "layers 0–15, 20"."""
    spans = tuple(ranges)
    texts = ", ".join(range_text(first, last) for first, last in spans)
    single = len(spans) == 1 and spans[0][0] == spans[0][1]
    return f"{'layer' if single else 'layers'} {texts}"


def lane_texts(content: LaneContent) -> tuple[str, ...]:
    """Return what a lane holds, longest form first."""
    if content.ranges:
        layers = ranges_text(content.ranges)
        count = sum(last - first + 1 for first, last in content.ranges)
        short = f"{count} layers in {len(content.ranges)} runs" if len(content.ranges) > 1 else layers
        if content.has_output:
            return f"{layers} + output", f"{layers}, out", layers, short
        return layers, short
    if content.has_output:
        return ("output only",)
    if content.blocks:
        return ("parts of layers",)
    if not content.device.present:
        return ("empty",)
    return "empty: drop layers here", "empty: drop here", "empty"


def layer_tooltip(layer: LayerBytes, layout: Layout) -> str:
    """Return where a layer is and what it weighs, a line each."""
    lines = [f"layer {layer.index} on {layout.device_of(layer.index)}", f"weights: {format_bytes(layer.weights_bytes)}"]
    for label, size_bytes in (
        ("attention", layer.attention_bytes),
        ("dense feed-forward", layer.ffn_bytes),
        ("experts", layer.expert_bytes),
        ("other", layer.other_bytes),
    ):
        if size_bytes:
            lines.append(f"{label}: {format_bytes(size_bytes)}")
    lines.append(f"KV cache: {format_bytes(layer.kv_bytes)}")
    return "\n".join(lines)


def output_tooltip(preview: Preview) -> str:
    """Return where the output layer is and what it weighs."""
    size = format_bytes(preview.output_weights_bytes)
    return f"output layer on {preview.layout.output_device}\nweights: {size}\nDrag it to another lane to move it."


def embedding_tooltip(preview: Preview) -> str:
    """Return why the token embedding has a place of its own."""
    return f"token embedding: {format_bytes(preview.token_embedding_bytes)}\nIt is always read by the host."


def boundary_text(layout: Layout, index: int) -> str:
    """Return what a boundary parts: "CUDA0 0–18 | CUDA1 19–31"."""
    left, right = layout.runs[index], layout.runs[index + 1]
    left_text, right_text = range_text(left.first, left.last), range_text(right.first, right.last)
    return f"{left.device} {left_text} | {right.device} {right_text}"


def focus_text(layout: Layout, focus: Focus | None) -> str:
    """Return what the keyboard has, "" for nothing."""
    match focus:
        case BoundaryFocus(index):
            return f"boundary {boundary_text(layout, index)}"
        case LayerFocus():
            return f"{layers_text(*focus.span)} on {layout.device_of(focus.layer)}"
        case OutputFocus():
            return f"output on {layout.output_device}"
    return ""


def summary_text(preview: Preview, selection: Selection) -> str:
    """Return the size of the chosen layers, or of the whole model where none are chosen."""
    if selection.layers is not None:
        first, last = selection.layers
        size = sum(layer.weights_bytes + layer.kv_bytes for layer in preview.layers[first : last + 1])
        return f"{layers_text(first, last)} with KV: {format_bytes(size)}"
    weights = sum(layer.weights_bytes for layer in preview.layers)
    weights += preview.token_embedding_bytes + preview.output_weights_bytes
    return f"{len(preview.layers)} layers · {format_bytes(weights)}"


def measured_texts(row: DeviceRow, forecast: DeviceRow) -> tuple[str, ...]:
    """Return what was measured beside what had been forecast, longest form first."""
    measured, expected = format_bytes(row.need_bytes), format_bytes(forecast.need_bytes)
    if row.need_bytes == 0 and forecast.need_bytes == 0:
        return ()
    return f"measured {measured}, forecast {expected}", f"{measured}, forecast {expected}", f"measured {measured}"


def held_texts(holdings: Sequence[Holding]) -> tuple[str, ...]:
    """Return who else holds memory where this model holds none, longest form first."""
    if not holdings:
        return ()
    names = ", ".join(each.model for each in holdings)
    return f"{names}: {format_bytes(sum(each.size_bytes for each in holdings))}", names


def note_lines(preview: Preview) -> tuple[tuple[str, bool], ...]:
    """Return the lines under the lanes, each with whether it is bad: violations with their remedies, notes, advice."""
    lines = [(f"{item.message} {item.remedy}".strip(), True) for item in preview.report.violations]
    if preview.report.probe_only:
        lines.append((f"Only a probe can tell what this takes: {preview.report.probe_only}", False))
    patterns = sum(1 for item in preview.layout.overrides if item.part is None)
    if patterns:
        noun = "override" if patterns == 1 else "overrides"
        lines.append((f"{patterns} {noun} by tensor name: counted in the bars, not drawn in the lanes.", False))
    lines += [(f"{item.message} {item.remedy}", False) for item in preview.report.advice]
    return tuple(lines)


def lane_sentence(content: LaneContent, row: DeviceRow | None) -> str:
    """Return what a lane holds and how much room it leaves."""
    holds = lane_texts(content)[0] if not content.is_empty else "empty"
    if row is None:
        return f"{content.device.id}: {holds}."
    return f"{content.device.id}: {holds}, {room_text(bar_of_row(row))} of {format_bytes(available_bytes(row))}."


def accessible_summary(preview: Preview, lanes: Sequence[LaneContent], state: EditState) -> str:
    """Return the whole picture as sentences."""
    rows = {row.id: row for row in preview.report.rows}
    sentences = [f"{preview.model_name}, {len(preview.layers)} layers, {state.value}."]
    sentences += [lane_sentence(content, rows.get(content.device.id)) for content in lanes]
    sentences.append(f"Output on {preview.layout.output_device}.")
    sentences += [text for text, _ in note_lines(preview)]
    return " ".join(sentences)


def is_short(row: DeviceRow, room: DeviceRow | None = None) -> bool:
    """Return whether the device lacks memory. One that holds nothing never does."""
    return row.need_bytes > 0 and shortfall_within(row, room or row) > 0

"""Texts of the layout editor: lane labels, whether the layout is loaded, tooltips, summary for screen readers."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from msgspec import Struct

from engine.base.language import tr, tr_count
from engine.base.units import format_bytes
from engine.devices.device import Holding
from engine.planning.layout.layout import Layout
from engine.planning.layout.parts import MOVABLE_PARTS, MovablePart, embedding_device, part_device, part_text
from engine.planning.plan.preview import LayerBytes, LoadedLayout, Preview
from engine.planning.plan.report import DeviceRow
from engine.planning.speed.prediction import DeviceTime, SpeedForecast
from engine.planning.speed.texts import (
    link_use_text,
    predicted_rate_text,
    prompt_text,
    rate_text,
    source_text,
    speed_sentence,
)
from widgets.common.memory_bar import available_bytes, bar_of_row, room_text, shortfall_within
from widgets.layout_editor.keyboard import (
    BoundaryFocus,
    DraftFocus,
    EmbeddingFocus,
    Focus,
    LayerFocus,
    OutputFocus,
    Selection,
)
from widgets.layout_editor.machines import row_of
from widgets.layout_editor.placement import LaneContent, unknown_patterns


class LoadedTexts(Struct, frozen=True):
    """Whether the shown layout is loaded, as a text and as a symbol, such as "●"."""

    sign: str
    text: str


NOT_LOADED = LoadedTexts("○", tr("not loaded"))
LOADED = LoadedTexts("●", tr("loaded"))
EDITED = LoadedTexts("◐", tr("edited, not loaded"))


def loaded_texts(preview: Preview, loaded: LoadedLayout | None) -> LoadedTexts:
    """Return whether `preview` is loaded, was edited since the load, or is not loaded.

    Its layout, settings and side files (projector, adapters, draft model) are compared with those of the load.
    """
    if loaded is None:
        return NOT_LOADED
    return EDITED if loaded.differs_from(preview.edit) else LOADED


def range_text(first: int, last: int) -> str:
    """Return a range of layers as text, such as "5" or "5–9"."""
    return str(first) if first == last else f"{first}–{last}"


def layers_text(first: int, last: int) -> str:
    """Return a range of layers as text, such as "layer 5" or "layers 5–9"."""
    return tr("layer {first}", first=first) if first == last else tr("layers {first}–{last}", first=first, last=last)


def ranges_text(ranges: Iterable[tuple[int, int]]) -> str:
    """Return ranges of layers as text, such as "layer 5" or "layers 0–15, 20"."""
    spans = tuple(ranges)
    texts = ", ".join(range_text(first, last) for first, last in spans)
    single = len(spans) == 1 and spans[0][0] == spans[0][1]
    return tr("layer {first}", first=texts) if single else tr("layers {ranges}", ranges=texts)


def lane_texts(content: LaneContent) -> tuple[str, ...]:
    """Return texts for the content of a lane, the longest first, so that a label can show the first that fits."""
    if content.group is not None and not content.group.is_folded:
        return (tr("see the devices below"),)
    if not content.has_draft:
        return _layer_texts(content)
    if not (content.ranges or content.blocks or content.has_output or content.share is not None):
        return tr("draft model only"), tr("draft only")
    texts = _layer_texts(content)
    return (*(tr("{layers} + draft", layers=text) for text in texts), *texts)


def _layer_texts(content: LaneContent) -> tuple[str, ...]:
    if content.share is not None:
        percent = f"{100 * content.share:.1f}"
        return tr("{percent} % of the layers", percent=percent), tr("{percent} %", percent=percent)
    if content.ranges:
        layers = ranges_text(content.ranges)
        count = sum(last - first + 1 for first, last in content.ranges)
        # A patchwork of many runs would fill the label with ranges, so the shortest form only counts them.
        short = (
            tr("{count} layers in {runs} groups", count=count, runs=len(content.ranges))
            if len(content.ranges) > 1
            else layers
        )
        if content.has_output:
            return tr("{layers} + output", layers=layers), tr("{layers}, out", layers=layers), layers, short
        return layers, short
    if content.has_output:
        return (tr("output only"),)
    if content.blocks:
        return (tr("parts of layers only"),)
    if not content.device.present:
        return (tr("empty"),)
    if content.has_embedding:
        return tr("token embedding only; drop layers here"), tr("token embedding only"), tr("token embedding")
    return tr("empty; drop layers here"), tr("empty; drop here"), tr("empty")


def layer_tooltip(layer: LayerBytes, layout: Layout) -> str:
    """Return the tooltip of a layer: its device and the bytes of its parts, one line each."""
    lines = [
        tr("layer {index} on {device}", index=layer.index, device=layout.device_of(layer.index)),
        tr("weights: {weights}", weights=format_bytes(layer.weights_bytes)),
    ]
    for label, size_bytes in (
        (tr("attention"), layer.attention_bytes),
        (tr("dense feed-forward"), layer.ffn_bytes),
        (tr("experts"), layer.expert_bytes),
        (tr("other"), layer.other_bytes),
    ):
        if size_bytes:
            # Dense models have no experts and recurrent layers may have no feed-forward; lines of 0 would only
            # distract.
            lines.append(f"{label}: {format_bytes(size_bytes)}")
    lines.append(tr("KV cache: {kv}", kv=format_bytes(layer.kv_bytes)))
    return "\n".join(lines)


def part_tooltip(preview: Preview, layer: int, part: MovablePart) -> str:
    """Return the tooltip of a part of a layer: its device and its bytes.

    If the layer itself is on another device, the tooltip also says how many bytes each token sends between the two
    devices, and how long that takes.
    """
    values, layout = preview.layers[layer], preview.layout
    size = values.expert_bytes if part == "experts" else values.attention_bytes + values.ffn_bytes
    device = part_device(layout, MOVABLE_PARTS[part][0], layer)
    lines = [
        tr("{part} of layer {layer} on {device}", part=part_text(part), layer=layer, device=device).strip(),
        tr("weights: {weights}", weights=format_bytes(size)),
    ]
    home = layout.device_of(layer)
    if device != home:
        lines.append(tr("The layer and its KV cache are on {device}.", device=home))
        # Twice: the input of the part goes to its device, and the result comes back.
        if preview.hops is not None:
            lines.append(
                tr(
                    "Each token sends {size} between the two devices, which takes about {time}.",
                    size=format_bytes(2 * preview.hops.size_bytes),
                    time=milliseconds_text(2 * preview.hops.between(home, device)),
                )
            )
        lines += filter(None, [pipeline_cost(preview)])
    lines.append(tr("Drag this part to another lane to move it. Selected layers move together."))
    return "\n".join(lines)


def boundary_cost(preview: Preview, index: int) -> str:
    """Return a sentence on the bytes that each token sends between two devices, and on the time for that.

    `index`: number of the boundary between the layers of the two devices. The result is empty if the time is unknown.
    """
    if preview.hops is None:
        return ""
    left, right = preview.layout.runs[index : index + 2]
    return tr(
        "Each token sends {size} from {left} to {right}, which takes about {time}.",
        size=format_bytes(preview.hops.size_bytes),
        left=left.device,
        right=right.device,
        time=milliseconds_text(preview.hops.between(left.device, right.device)),
    )


def pipeline_cost(preview: Preview) -> str:
    """Return a sentence on the prompt speed that is lost because overrides turn off pipeline parallelism.

    The result is empty if overrides do not turn it off, or if the loss is small or unknown.
    """
    prompt = None if preview.speed is None else preview.speed.prompt
    if prompt is None or all(each.rule != "override_stops_pipeline" for each in preview.report.advice):
        return ""
    # Devices of a pipeline work at the same time on different micro batches, so the slowest one would decide.
    seconds = [each.seconds for each in prompt.devices]
    factor = sum(seconds) / max(seconds, default=1.0) if any(seconds) else 1.0
    if factor < 1.05:
        return ""
    return tr(
        "Overrides turn off pipeline parallelism. Without them a long prompt could be processed up to {factor} times "
        "as fast.",
        factor=f"{factor:.1f}",
    )


def parts_elsewhere(layout: Layout, layer: LayerBytes) -> tuple[tuple[MovablePart, str], ...]:
    """Return the parts of a layer that are on another device than the layer itself, each with its device."""
    found: list[tuple[MovablePart, str]] = []
    home = layout.device_of(layer.index)
    for part, names in MOVABLE_PARTS.items():
        if part == "experts" and not layer.expert_bytes:
            continue
        device = next((each for name in names if (each := part_device(layout, name, layer.index)) != home), home)
        if device != home:
            found.append((part, device))
    return tuple(found)


def output_tooltip(preview: Preview) -> str:
    """Return the tooltip of the output layer: its device and its bytes."""
    size = format_bytes(preview.output_weights_bytes)
    return tr(
        "output layer on {output_device}\nweights: {size}\nDrag the output layer to another lane to move it.",
        output_device=preview.layout.output_device,
        size=size,
    )


def embedding_tooltip(preview: Preview) -> str:
    """Return the tooltip of the token embedding: its device, its bytes, and whether it can be moved."""
    if preview.embedding_moves:
        return tr(
            "token embedding on {device}: {token_embedding}\nDrag the embedding to another lane to move it.",
            device=embedding_device(preview.layout),
            token_embedding=format_bytes(preview.token_embedding_bytes),
        )
    return tr(
        "token embedding: {token_embedding}\nllama.cpp always places the embedding on the CPU.",
        token_embedding=format_bytes(preview.token_embedding_bytes),
    )


def draft_tooltip(preview: Preview) -> str:
    """Return the tooltip of the draft model or MTP head: its devices and its bytes; empty if there is none."""
    draft = preview.draft
    if draft is None:
        return ""
    if not draft.name:
        return tr(
            "MTP head on {devices}, the last layer of the model\nKV cache and buffers: {size}\nThe MTP head "
            "drafts up to {count} tokens, which the model checks in one step.\nDrag the MTP head to another lane "
            "to move that layer.",
            devices=", ".join(draft.devices),
            size=format_bytes(draft.size_bytes),
            count=draft.n_tokens,
        )
    return tr(
        "draft model {name} on {devices}\nweights, KV cache and buffers: {size}\nThe draft model drafts up to "
        "{count} tokens, which the model checks in one step.\nDrag the draft model to another lane to move it.",
        name=draft.name,
        devices=", ".join(draft.devices),
        size=format_bytes(draft.size_bytes),
        count=draft.n_tokens,
    )


def boundary_text(layout: Layout, index: int) -> str:
    """Return devices and layers on both sides of a boundary as text, such as "CUDA0 0–18 | CUDA1 19–31"."""
    left, right = layout.runs[index], layout.runs[index + 1]
    left_text, right_text = range_text(left.first, left.last), range_text(right.first, right.last)
    return f"{left.device} {left_text} | {right.device} {right_text}"


def focus_text(preview: Preview, focus: Focus | None) -> str:
    """Return the focused boundary, layers, output, embedding or draft as text; empty if there is no focus."""
    layout = preview.layout
    match focus:
        case BoundaryFocus(index):
            return tr("boundary {boundary}", boundary=boundary_text(layout, index))
        case LayerFocus():
            return tr("{layers} on {device}", layers=layers_text(*focus.span), device=layout.device_of(focus.layer))
        case OutputFocus():
            return tr("output on {output_device}", output_device=layout.output_device)
        case EmbeddingFocus():
            return tr("embedding on {device}", device=embedding_device(layout))
        case DraftFocus() if preview.draft is not None:
            return tr("draft on {device}", device=", ".join(preview.draft.devices))
    return ""


def summary_text(preview: Preview, selection: Selection) -> str:
    """Return as text the size of the selected layers with KV cache; if none is selected, the size of the model."""
    if selection.layers is not None:
        first, last = selection.layers
        size = sum(layer.weights_bytes + layer.kv_bytes for layer in preview.layers[first : last + 1])
        return tr("{layers}: {size} including KV cache", layers=layers_text(first, last), size=format_bytes(size))
    weights = sum(layer.weights_bytes for layer in preview.layers)
    weights += preview.token_embedding_bytes + preview.output_weights_bytes
    return tr("{count} layers · {weights}", count=len(preview.layers), weights=format_bytes(weights))


def measured_texts(row: DeviceRow, forecast: DeviceRow) -> tuple[str, ...]:
    """Return texts with the measured and the forecast memory of a device, the longest first.

    The first text that fits is painted. The result is empty if both sizes are zero.
    """
    measured, expected = format_bytes(row.need_bytes), format_bytes(forecast.need_bytes)
    if row.need_bytes == 0 and forecast.need_bytes == 0:
        return ()
    return (
        tr("measured {measured}, forecast {expected}", measured=measured, expected=expected),
        tr("{measured}, forecast {expected}", measured=measured, expected=expected),
        tr("measured {measured}", measured=measured),
    )


def held_texts(holdings: Sequence[Holding]) -> tuple[str, ...]:
    """Return texts about the memory that other loaded models hold on a device, the longest first.

    The first text that fits is painted. The result is empty if no other models hold memory there.
    """
    if not holdings:
        return ()
    names = ", ".join(each.model for each in holdings)
    return f"{names}: {format_bytes(sum(each.size_bytes for each in holdings))}", names


def note_lines(preview: Preview) -> tuple[tuple[str, bool], ...]:
    """Return the lines below the lanes as pairs of a text and whether it is a warning.

    Warnings are the rules of llama.cpp that the layout breaks, with remedies. The other lines are notes and advice.
    """
    lines = [(f"{item.message} {item.remedy}".strip(), True) for item in preview.report.violations]
    if preview.report.probe_only:
        lines.append(
            (tr("The memory forecast is incomplete: {probe_only}", probe_only=preview.report.probe_only), False)
        )
    # A pattern can match any tensor, and the lanes draw parts of layers only.
    patterns = unknown_patterns(preview.layout)
    if patterns:
        lines.append(
            (
                tr_count(
                    "{count} tensor override with a pattern of its own is not shown in the lanes.",
                    "{count} tensor overrides with patterns of their own are not shown in the lanes.",
                    patterns,
                ),
                False,
            )
        )
    lines += [(f"{item.message} {item.remedy}", False) for item in preview.report.advice]
    lines += [(line, False) for line in sending_notes(preview)]
    return tuple(lines)


def lane_sentence(content: LaneContent, row: DeviceRow | None) -> str:
    """Return a sentence with the content of a lane and the free memory of its device."""
    holds = lane_texts(content)[0] if not content.is_empty else tr("empty")
    if row is None:
        return f"{content.device.id}: {holds}."
    if content.device.state and content.is_empty:
        return tr("{id}: {contents}, {state}.", id=content.device.id, contents=holds, state=content.device.state)
    return tr(
        "{id}: {contents}, {room} of {available}.",
        id=content.device.id,
        contents=holds,
        room=room_text(bar_of_row(row)),
        available=format_bytes(available_bytes(row)),
    )


def accessible_summary(preview: Preview, lanes: Sequence[LaneContent], state: LoadedTexts) -> str:
    """Return the summary for screen readers: model, lanes, output and notes as sentences.

    `state`: whether the layout is loaded, as text.
    """
    rows = {row.id: row for row in preview.report.rows}
    sentences = [
        tr(
            "{model_name}, {count} layers, {value}.",
            model_name=preview.model_name,
            count=len(preview.layers),
            value=state.text,
        )
    ]
    sentences += [lane_sentence(content, row_of(content, rows)) for content in lanes]
    sentences.append(tr("Output on {output_device}.", output_device=preview.layout.output_device))
    if preview.draft is not None:
        devices = ", ".join(preview.draft.devices)
        if preview.draft.name:
            sentences.append(tr("Draft model {name} on {devices}.", name=preview.draft.name, devices=devices))
        else:
            sentences.append(tr("MTP head on {devices}.", devices=devices))
    sentences += [text for text, _ in note_lines(preview)]
    return " ".join(sentences)


def is_short(row: DeviceRow, room: DeviceRow | None = None) -> bool:
    """Return whether the layout needs more memory on a device than is available; False if it needs none there.

    `row`: memory that the layout needs on the device.
    `room`: a newer row of the same device, whose free memory and cap apply; None: those of `row` apply.
    """
    return row.need_bytes > 0 and shortfall_within(row, room or row) > 0


_TOOLTIP_FROM_S, _NOTE_FROM_S = 1.0, 5.0
"""Least time in seconds that sending weights to a worker must take to be mentioned: in the tooltip of the speed (first
value), and in a note below the lanes (second value).
"""
_ALIKE = 1.1
"""Ratio up to which predicted and measured speed count as equal, so that only the measured speed is shown."""
REMEDY = tr("Devices > Measure Speeds makes this prediction more exact, and so does each answer.")


def speed_text(preview: Preview) -> str:
    """Return the speed of the edited layout as text: measured in the last answer with this layout, or else predicted.

    If both are known and differ by more than the factor `_ALIKE`, the text has both. It then also says how many tokens
    in the context the prediction assumes. A prediction is marked as rough if it uses typical values for a device that
    was not measured.
    """
    speed = preview.speed
    measured = "" if preview.answered_per_second is None else rate_text(preview.answered_per_second)
    if speed is None:
        return tr("{rate} tokens/s measured", rate=measured) if measured else ""
    rate = predicted_rate_text(speed.tokens_per_second)
    if preview.answered_per_second is not None:
        answers = tr("{rate} tokens/s measured", rate=measured)
        # A speed at another fill is a different one; without the fill it would contradict what was just measured.
        if not 1 / _ALIKE <= speed.tokens_per_second / preview.answered_per_second <= _ALIKE:
            answers = tr(
                "{rate} tokens/s measured, about {predicted} with {fill_tokens} tokens in the context",
                rate=measured,
                predicted=rate,
                fill_tokens=speed.n_tokens,
            )
    elif speed.is_known:
        answers = speed.text()
    else:
        answers = tr("roughly {rate} tokens/s (not measured)", rate=rate)
    prompt = speed.prompt
    return answers if prompt is None or not prompt.is_known else f"{answers}, {_prompt_text(prompt)}"


def _prompt_text(prompt: SpeedForecast) -> str:
    return tr("prompt {rate} tokens/s", rate=predicted_rate_text(prompt.tokens_per_second))


def speed_tool_tip(preview: Preview) -> str:
    """Return the tooltip of the speed: the predicted speed, and for each device the time for a token with its source.

    The source says how the time is known, such as by a measurement of the device or as a guess.
    """
    speed = preview.speed
    if speed is None:
        return "\n".join(_sending_lines(preview))
    lines = [speed_sentence(speed) if speed.is_known else _guess_text(speed)]
    if preview.usual_speed is not None and speed.is_known:
        lines.append(speed_sentence(preview.usual_speed))
    if speed.prompt is not None and (read := prompt_text(speed.prompt)):
        lines.append(read)
    for each in speed.devices:
        network = (
            tr(", including {milliseconds} for the network", milliseconds=milliseconds_text(each.link_s))
            # Less than 2 % of the device's time is not worth words.
            if each.link_s >= 0.02 * each.seconds
            else ""
        )
        time = tr(
            "{milliseconds} per token{network} ({source})",
            milliseconds=lane_speed_text(each),
            network=network,
            source=source_text(each.source),
        )
        lines.append(f"{each.id}: {time}")
    lines.extend(link_use_text(speed, each) for each in speed.links)
    if any(each.source in ("card", "guess") for each in speed.devices):
        lines.append(REMEDY)
    if preview.answered_per_second is not None:
        lines.append(tr("Last answer with this layout: {rate} tokens/s.", rate=rate_text(preview.answered_per_second)))
    return "\n".join([*lines, *_sending_lines(preview)])


def _guess_text(speed: SpeedForecast) -> str:
    return tr(
        "Roughly {rate} tokens per second, with typical speeds for devices that were not measured: {unknown}.",
        rate=predicted_rate_text(speed.tokens_per_second),
        unknown=", ".join(each.id for each in speed.devices if each.source == "guess"),
    )


def _sending_lines(preview: Preview, least_s: float = _TOOLTIP_FROM_S) -> list[str]:
    """Return a line for each worker to which a load would send weights for `least_s` seconds or more."""
    return [
        tr(
            "Loading sends {size} to {id}, which takes about {seconds:.0f} s, or less if the worker has cached "
            "some of the weights.",
            size=format_bytes(each.size_bytes),
            id=each.id,
            seconds=each.seconds,
        )
        for each in preview.sendings
        if each.seconds >= least_s
    ]


def sending_notes(preview: Preview) -> list[str]:
    """Return a line for each worker to which a load would send weights for at least `_NOTE_FROM_S` seconds."""
    return _sending_lines(preview, _NOTE_FROM_S)


def lane_speed_text(time: DeviceTime | None) -> str:
    """Return the time that a device takes for a token as text, with "~" if it is a guess; empty for None."""
    if time is None:
        return ""
    about = "~" if time.source == "guess" else ""
    return f"{about}{milliseconds_text(time.seconds)}"


def milliseconds_text(seconds: float) -> str:
    """Return a duration as text with two digits or more, such as "12 ms", "1.2 ms" or "0.12 ms"."""
    value = seconds * 1e3
    return f"{value:.0f} ms" if value >= 10 else f"{value:.1f} ms" if value >= 1 else f"{value:.2f} ms"

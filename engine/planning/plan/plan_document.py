"""The forecast of a plan as a JSON document (`plan` in docs/contract.md) and as a text table."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from engine.base.units import format_bytes
from engine.base.values import replace
from engine.planning.layout.layout import range_text
from engine.planning.layout.layout_file import LayoutFile, layout_document
from engine.planning.memory.drafts import Draft
from engine.planning.plan.advice import Advice
from engine.planning.plan.plan import Plan
from engine.planning.plan.report import DeviceRow, FitReport
from engine.planning.settings.context_settings import ContextSettings
from engine.planning.speed.prediction import SpeedForecast
from engine.planning.speed.speeds import Sending
from engine.planning.speed.texts import link_use_text, prompt_text, speed_sentence

_HEADINGS = (
    "device",
    "weights",
    "KV cache",
    "compute",
    "output",
    "overhead",
    "need",
    "free",
    "margin",
    "short by",
    "grade",
)


def plan_document(
    plan: Plan, explanation: str | None = None, speed: SpeedForecast | None = None, sent: Sequence[Sending] = ()
) -> dict[str, object]:
    """Return the JSON document that `layerdeck-cli plan` prints. Keys whose value would be empty are left out.

    `explanation`: sentences on how the layout was found.
    `speed`: predicted speed of answers; None if unknown.
    `sent`: bytes of weights that a load sends to each RPC worker.
    """
    report = plan.report
    document: dict[str, object] = {
        "layout": layout_document(_planned_file(plan)),
        "devices": [msgspec.to_builtins(row) for row in report.rows],
        "fits": report.fits,
        "violations": [msgspec.to_builtins(violation) for violation in report.violations],
    }
    if plan.edit.side_files.draft is not None:
        document["draft"] = _draft_document(plan, plan.edit.side_files.draft)
    document["decisions"] = [msgspec.to_builtins(each) for each in report.decisions]
    notes = _notes(report)
    if notes:
        document["advice"] = [msgspec.to_builtins(each) for each in notes]
    if explanation is not None:
        document["explanation"] = explanation
    if speed is not None:
        document["speed"] = _speed_document(speed)
    if sent:
        document["sending"] = [
            {"id": each.id, "size_bytes": each.size_bytes, "seconds": round(each.seconds, 3)} for each in sent
        ]
    return document


def _draft_document(plan: Plan, draft: Draft) -> dict[str, object]:
    """Return as JSON how answers are drafted: by a draft model, n-grams or MTP heads, and how many tokens.

    For a draft model, the object has its path and its own memory forecast.
    """
    document: dict[str, object] = {"kind": draft.kind, "tokens": draft.n_tokens}
    if plan.draft_plan is not None:
        document["model"] = str(draft.path)
        document["devices"] = [msgspec.to_builtins(row) for row in plan.draft_plan.forecast if row.need_bytes]
    return document


def _speed_document(speed: SpeedForecast) -> dict[str, object]:
    """Return the predicted speed as JSON. Numbers are null if the speed of a device is only a guess."""
    document: dict[str, object] = {
        "tokens_per_second": round(speed.tokens_per_second, 2) if speed.is_known else None,
        "context_tokens": speed.n_tokens,
        "source": speed.source,
        "uncertainty": speed.uncertainty,
        "devices": [
            {
                "id": each.id,
                "token_ms": None if each.source == "guess" else round(each.seconds * 1e3, 3),
                "link_ms": None if each.source == "guess" else round(each.link_s * 1e3, 3),
                "source": each.source,
            }
            for each in speed.devices
        ],
    }
    if speed.links:
        document["links"] = [
            {
                "id": each.id,
                "round_trip_ms": round(each.latency_s * 1e3, 3),
                "bytes_per_second": round(each.bytes_per_second),
                "token_bytes": round(each.token_bytes),
                "lost_tokens_per_second": round(speed.lost_per_second(each), 2) if speed.is_known else None,
                "is_measured": each.is_measured,
            }
            for each in speed.links
        ]
    if speed.prompt is not None:
        document["prompt"] = _prompt_document(speed.prompt)
    return document


def _prompt_document(prompt: SpeedForecast) -> dict[str, object]:
    return {
        "tokens_per_second": round(prompt.tokens_per_second, 2) if prompt.is_known else None,
        "tokens": prompt.n_tokens,
        "source": prompt.source,
        "uncertainty": prompt.uncertainty,
        "devices": [
            {
                "id": each.id,
                "token_ms": None if each.source == "guess" else round(each.seconds * 1e3, 4),
                "source": each.source,
            }
            for each in prompt.devices
        ],
    }


def plan_text(
    plan: Plan, explanation: str | None = None, speed: SpeedForecast | None = None, sent: Sequence[Sending] = ()
) -> str:
    """Return the forecast as text: layers of each device, a row of memory for each device, shortfalls and broken rules.

    `explanation`: sentences on how the layout was found.
    `speed`: predicted speed of answers; None if unknown.
    `sent`: bytes of weights that a load sends to each RPC worker.
    """
    report, layout = plan.report, plan.edit.layout
    runs = [f"  {range_text(run.first, run.last):>9}  {run.device}" for run in layout.runs]
    lines = [
        f"{plan.model.name or 'model'}: {layout.n_layers} layers, context {plan.settings.n_ctx}",
        *runs,
        f"  {'output':>9}  {layout.output_device}",
        *([] if explanation is None else ["", explanation]),
        "",
        *_table(_with_drafts(report.rows)),
    ]
    mapped_bytes = sum(row.mapped_bytes for row in report.rows)
    if mapped_bytes:
        lines.append(f"The host also maps {format_bytes(mapped_bytes)} of the file, which the system can reclaim.")
    lines += [
        f"The projector computes the largest image in {format_bytes(row.projector_bytes)} on {row.id}, part of compute."
        for row in report.rows
        if row.projector_bytes
    ]
    if plan.edit.side_files.projector is not None and plan.probed is None:
        lines.append("The projector's compute buffer for images is not included; a probe measures it (--probe).")
    lines += [f"{violation.message} {violation.remedy}" for violation in report.violations]
    lines += [f"{each.message} {each.remedy}" for each in _notes(report)]
    lines += [f"{row.id} is short by {format_bytes(row.shortfall_bytes)}." for row in report.rows if row.is_short]
    if speed is not None:
        lines.append(_speed_line(speed))
    lines += [
        f"A load sends {format_bytes(each.size_bytes)} to {each.id}, which takes about {each.seconds:.2g} s."
        for each in sent
    ]
    lines += ["", *_decision_lines(report), ""] if report.decisions else []
    lines.append(_verdict(report))
    return "\n".join(lines)


def _speed_line(speed: SpeedForecast) -> str:
    if not speed.is_known:
        return f"{speed_sentence(speed)} `layerdeck-cli devices --measure` measures it."
    parts = (f"{each.id} {each.seconds * 1e3:.3g} ms" for each in speed.devices if each.source != "guess")
    prompt = "" if speed.prompt is None else prompt_text(speed.prompt)
    links = [link_use_text(speed, each) for each in speed.links]
    return " ".join(filter(None, (f"{speed_sentence(speed)} A token: {', '.join(parts)}.", prompt, *links)))


def _verdict(report: FitReport) -> str:
    if report.violations:
        return "It cannot be loaded."
    if not report.fits:
        return "It does not fit."
    return "It fits." if report.probe_only is None else "The part that could be forecast fits."


def _notes(report: FitReport) -> tuple[Advice, ...]:
    """Return the advice of the report. If the memory of some parts could not be forecast, a note says so first."""
    if report.probe_only is None:
        return report.advice
    # Missing parts count as 0 bytes, so the forecast errs towards "it fits".
    remedy = "Plan it on the computer that has these devices; until then the numbers are too small."
    message = f"Not everything could be forecast: {report.probe_only}."
    return (Advice("incomplete_forecast", message, remedy), *report.advice)


def _planned_file(plan: Plan) -> LayoutFile:
    return replace(plan.edit.as_file(plan.model.name), context=_planned(plan))


def _planned(plan: Plan) -> ContextSettings:
    """Return the user's settings, with the decided context length in place of "auto".

    The result is for the layout file in the document. Its context length must be the one of the forecast.
    """
    return replace(plan.edit.context, n_ctx=plan.settings.n_ctx)


def _decision_lines(report: FitReport) -> list[str]:
    width = max(len(each.setting) for each in report.decisions)
    return [f"  {each.setting.ljust(width)}  {_value_text(each.value)}: {each.reason}" for each in report.decisions]


def _value_text(value: str | int | bool) -> str:
    return ("on" if value else "off") if isinstance(value, bool) else str(value)


_DRAFT_COLUMN = 5


def _with_drafts(rows: Sequence[DeviceRow]) -> list[tuple[str, ...]]:
    """Return headings and rows of the table, with a column for a draft model if there is one."""
    found: list[tuple[str, ...]] = [_HEADINGS, *(_cells(row) for row in rows)]
    if not any(row.draft_bytes for row in rows):
        return found
    column = ("draft", *(format_bytes(row.draft_bytes) for row in rows))
    return [(*cells[:_DRAFT_COLUMN], cell, *cells[_DRAFT_COLUMN:]) for cells, cell in zip(found, column, strict=True)]


def _cells(row: DeviceRow) -> tuple[str, ...]:
    sizes = (
        row.weights_bytes,
        row.kv_cache_bytes + row.recurrent_bytes,
        row.compute_bytes,
        row.output_bytes,
        row.overhead_bytes + row.answering_bytes,
        row.need_bytes,
    )
    free = "unknown" if row.free_bytes is None else format_bytes(row.free_bytes)
    # Below 0 the number is room to spare, which the column "short by" must not show.
    short = format_bytes(row.shortfall_bytes) if row.is_short else "-"
    return (row.id, *map(format_bytes, sizes), free, format_bytes(row.margin_bytes), short, row.grade.value)


def _table(rows: Sequence[Sequence[str]]) -> list[str]:
    """Return the lines of a text table: first and last column aligned to the left, columns of numbers to the right."""
    widths = [max(len(cell) for cell in column) for column in zip(*rows, strict=True)]
    last = len(widths) - 1
    return [
        "  ".join(
            cell.ljust(width) if number in (0, last) else cell.rjust(width)
            for number, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]

"""The report as text for the clipboard."""

from __future__ import annotations

from engine.language import tr
from widgets.load_report.columns import DIFFERENCE_TITLE, table_lines, visible_columns
from widgets.load_report.outcome import Outcome, ProposalWords

ATTEMPTS_TITLE = tr("Layouts that were tried")


def plain_report(outcome: Outcome) -> str:
    """Return the whole report, the table in columns of spaces."""
    paragraphs = [f"{outcome.badge}: {outcome.sentence}"]
    if outcome.rows:
        paragraphs.append("\n".join(line for line in (outcome.rows_title, _table(outcome)) if line))
    paragraphs += [text for text in (outcome.detail, "\n".join(map(_proposal, outcome.proposals))) if text]
    if outcome.attempts:
        paragraphs.append("\n".join((ATTEMPTS_TITLE, *outcome.attempts)))
    return "\n\n".join(paragraphs) + "\n"


def _proposal(words: ProposalWords) -> str:
    return f"{words.text} ({words.detail})" if words.detail else words.text


def _table(outcome: Outcome) -> str:
    head = [tr("device"), *(column.title for column in visible_columns(outcome.rows))]
    lines = table_lines(outcome)
    has_forecast = any(line.forecast for line in lines)
    cells = [[*head, DIFFERENCE_TITLE] if has_forecast else head]
    for line in lines:
        cells.append([line.device, *line.measured, line.difference] if has_forecast else [line.device, *line.measured])
        if line.forecast:
            cells.append([f"  {tr('forecast')}", *line.forecast, ""])
    widths = [max(len(row[position]) for row in cells) for position in range(len(cells[0]))]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if position == 0 else cell.rjust(width)
            for position, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in cells
    )

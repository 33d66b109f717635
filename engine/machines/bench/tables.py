"""Results of a benchmark as rows of a table, and as plain text, CSV and Markdown."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator, Mapping

import msgspec
from msgspec import Struct

from engine.base.language import tr
from engine.base.units import format_bytes
from engine.machines.bench.results import RATES, BenchResults, Comparison, DeviceState, Measure, Measured

MEASURE_TEXTS: dict[Measure, str] = {
    "prompt": tr("prompt"),
    "generation": tr("generation"),
    "first_token": tr("time to first token"),
    "load": tr("load time"),
    "answer": tr("time of the whole answer"),
}
_COLUMNS = ("layout", "test", "unit", "median", "low", "high", "rounds", "against", "ratio", "ratio_low", "ratio_high",
            "verdict")  # fmt: skip


class Row(Struct, frozen=True):
    """One measure of one layout, a row of the table of results.

    `depth`: tokens in the context before the prompt.
    `value`: median, in `unit`.
    `low`, `high`: confidence interval of the median, None if there are too few rounds.
    `comparison`: comparison with another layout, None for the base.
    """

    layout: str
    measure: Measure
    depth: int
    value: float
    low: float | None
    high: float | None
    n_rounds: int
    comparison: Comparison | None

    @property
    def unit(self) -> str:
        return "tokens/s" if self.measure in RATES else "s"


def rows_of(results: BenchResults) -> tuple[Row, ...]:
    """Return the rows of the table: for each layout its measures at each depth, and then its load time."""
    return tuple(row for each in results.layouts for row in _rows(results, each))


def _rows(results: BenchResults, measured: Measured) -> Iterator[Row]:
    compared = {(each.measure, each.depth): each for each in results.comparisons if each.name == measured.name}
    measures: tuple[Measure, ...] = ("prompt", "generation", "first_token", "answer")
    asked = [(measure, depth) for depth in measured.depths for measure in measures]
    for measure, depth in (*asked, ("load", 0)):
        value = measured.middle(measure, depth)
        if value is not None:
            low, high = measured.interval(measure, depth) or (None, None)
            n_rounds = len(measured.values(measure, depth))
            yield Row(measured.name, measure, depth, value, low, high, n_rounds, compared.get((measure, depth)))


def name_of_test(results: BenchResults, row: Row) -> str:
    """Return the name of a row's test, as llama-bench writes it: "pp512" or "tg128 @ d4096"."""
    preset = results.preset
    names: dict[Measure, str] = {"prompt": f"pp{preset.prompt_tokens}", "generation": f"tg{preset.answer_tokens}",
                                 "first_token": "ttft", "load": "load",
                                 "answer": f"pp{preset.prompt_tokens}+tg{preset.answer_tokens}"}  # fmt: skip
    return names[row.measure] + (f" @ d{row.depth}" if row.depth else "")


def verdict_text(found: Comparison) -> str:
    """Return the verdict of a comparison as text, such as "1.31 times as fast (1.22 to 1.40)"."""
    if found.verdict == "open":
        return tr("too few rounds for a verdict")
    if found.verdict == "same":
        return tr(
            "no difference seen (speed ratio {low:.2f} to {high:.2f})",
            low=found.low or found.ratio,
            high=found.high or found.ratio,
        )
    return tr(
        "{ratio:.2f} times as fast (95 % interval: {low:.2f} to {high:.2f})",
        ratio=found.ratio,
        low=found.low or found.ratio,
        high=found.high or found.ratio,
    )


def number(value: float) -> str:
    """Return a number as text, rounded to about four digits."""
    return f"{value:.0f}" if value >= 1000 else f"{value:.4g}"


# ------------------------------------------------------------------ formats


def csv_text(results: BenchResults) -> str:
    """Return the rows of the results as CSV with a header line."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(_COLUMNS)
    for row in rows_of(results):
        found = row.comparison
        comparison_columns = (
            ("", "", "", "", "") if found is None else (found.base, found.ratio, found.low, found.high, found.verdict)
        )
        writer.writerow(
            (
                row.layout,
                name_of_test(results, row),
                row.unit,
                row.value,
                row.low,
                row.high,
                row.n_rounds,
                *comparison_columns,
            )
        )
    return out.getvalue().rstrip("\n")


def markdown_text(results: BenchResults) -> str:
    """Return the rows of the results as a Markdown table with columns like llama-bench's model, size, test and t/s."""
    model = results.model
    lines = [
        "| model | size | layout | test | t/s or s | against | ratio |",
        "| --- | ---: | --- | ---: | ---: | --- | --- |",
    ]
    for row in rows_of(results):
        spread = "" if row.low is None or row.high is None else f" ({number(row.low)} – {number(row.high)})"
        found = row.comparison
        cells = (
            model.name,
            format_bytes(model.size_bytes),
            row.layout,
            name_of_test(results, row),
            f"{number(row.value)}{'' if row.measure in RATES else ' s'}{spread}",
            found.base if found is not None else "",
            verdict_text(found) if found is not None else "",
        )
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    lines += ["", f"{machine_text(results)}, {results.engine}"]
    return "\n".join(lines)


def machine_text(results: BenchResults) -> str:
    """Return the description of the benchmark's machine on one line."""
    machine = results.machine
    devices = ", ".join(f"{each.id} {each.name}".strip() for each in machine.devices)
    parts = (machine.system, machine.processor, format_bytes(machine.memory_bytes), devices)
    return ", ".join(part for part in parts if part)


def text_of(results: BenchResults) -> str:
    """Return the results as plain text for people."""
    preset = results.preset
    lines = [
        tr(
            "{name}: prompts of {prompt} tokens, answers of {answer} tokens, {rounds} rounds, layouts measured "
            "alternately",
            name=results.model.name,
            prompt=preset.prompt_tokens,
            answer=preset.answer_tokens,
            rounds=preset.n_rounds,
        ),
        machine_text(results),
    ]
    for measured in results.layouts:
        lines += ["", *_layout_lines(results, measured)]
    lines += ["", *closing_lines(results)]
    return "\n".join(lines).rstrip()


def _layout_lines(results: BenchResults, measured: Measured) -> Iterator[str]:
    yield measured.name
    for row in _rows(results, measured):
        label = MEASURE_TEXTS[row.measure] + (tr(" at depth {depth}", depth=row.depth) if row.depth else "")
        spread = "" if row.low is None or row.high is None else f" ({number(row.low)} – {number(row.high)})"
        versus = ""
        if row.comparison is not None:
            base, verdict = row.comparison.base, verdict_text(row.comparison)
            versus = tr("; compared with {base}: {verdict}", base=base, verdict=verdict)
        yield f"  {label}: {number(row.value)} {row.unit}{spread}{versus}"
    yield from (f"  {line}" for line in side_lines(measured))


def side_lines(measured: Measured) -> Iterator[str]:
    """Yield the lines of text that follow the speeds of a layout.

    The lines state the predicted speed, memory and state of the devices, the load by other programs, and the problem
    that ended the measurement.
    """
    generation = measured.middle("generation")
    if measured.predicted_per_second and generation:
        yield tr(
            "predicted before the measurement: {predicted} tokens/s", predicted=number(measured.predicted_per_second)
        )
    for memory in measured.memory:
        parts = (
            [tr("forecast {size}", size=format_bytes(memory.forecast_bytes))]
            if memory.forecast_bytes is not None
            else []
        )
        parts += (
            [tr("buffers {size}", size=format_bytes(memory.measured_bytes))]
            if memory.measured_bytes is not None
            else []
        )
        parts += [tr("peak {size}", size=format_bytes(memory.peak_bytes))] if memory.peak_bytes is not None else []
        yield tr("memory of {device}: {parts}", device=memory.device, parts=", ".join(parts))
    for state in measured.devices:
        yield f"{state.device}: {', '.join(_state_words(state))}"
    load = measured.other_load
    if load is not None:
        yield tr("other programs used {percent:.0f} % of the processors", percent=100 * load)
    if measured.problem:
        yield measured.problem


def _state_words(state: DeviceState) -> Iterator[str]:
    if state.clock_mhz is not None:
        yield f"{state.clock_mhz:.0f} MHz"
    if state.temperature_c is not None:
        yield f"{state.temperature_c:.0f} °C"
    if state.power_w is not None:
        yield f"{state.power_w:.0f} W"
    if state.joules_per_token is not None:
        yield tr("{joules:.2f} J per token", joules=state.joules_per_token)
    if state.throttled:
        yield tr("throttled: {reasons}", reasons=state.throttled)


def closing_lines(results: BenchResults) -> Iterator[str]:
    """Yield the last sentences of the results: whether answers are equal, notes, why it ended early, fastest layout."""
    for check in results.answers:
        if check.same:
            yield tr("{name} gave the same greedy answers as {base}.", name=check.name, base=check.base)
        else:
            yield check.sentence
    yield from results.notes
    if results.ended:
        yield results.ended
    if results.winner and len(results.layouts) > 1:
        yield winner_text(results)


def with_titles(results: BenchResults, titles: Mapping[str, str]) -> BenchResults:
    """Return the results with titles for people in place of the names of strategies.

    If a name has words after a comma, such as "priority, split", only the part before the comma is replaced.

    `titles`: title of each strategy by its name.
    """

    def title(name: str) -> str:
        strategy, comma, rest = name.partition(",")
        return titles.get(strategy, strategy) + comma + rest

    replace = msgspec.structs.replace
    return replace(
        results,
        layouts=tuple(replace(each, name=title(each.name), against=title(each.against)) for each in results.layouts),
        comparisons=tuple(replace(each, base=title(each.base), name=title(each.name)) for each in results.comparisons),
        answers=tuple(replace(each, base=title(each.base), name=title(each.name)) for each in results.answers),
        winner=title(results.winner),
    )


def winner_text(results: BenchResults) -> str:
    """Return a sentence that names the fastest layout."""
    first = results.layouts[0].name
    if results.winner == first:
        return tr("No layout was measurably faster than {name}.", name=first)
    return tr("Fastest: {name}.", name=results.winner)

"""The `plan` command: forecasts the memory and the speed of a layout."""

from __future__ import annotations

from argparse import Namespace

from app.cli import exit_codes
from app.cli.inputs import plan_request_on, read_inputs
from app.cli.output import print_document, print_line
from app.paths import speeds_path
from engine.base.errors import ArgumentError, BusyError, UnreachableError
from engine.devices.card_catalogue import with_cards
from engine.machines.rigs.speeds import known_speeds
from engine.planning.fit.speed_book import read_speed_book
from engine.planning.layout.layout_file import LayoutFile, read_layout
from engine.planning.plan.comparison import compare_plans, comparison_text, side_of
from engine.planning.plan.edit import edit_of_file
from engine.planning.plan.figures import FIGURES, figures_of
from engine.planning.plan.plan import Plan
from engine.planning.plan.plan_document import plan_document, plan_text
from engine.planning.plan.preview import plan_sendings
from engine.runtime.probing.probe import probe


def run_plan(options: Namespace) -> int:
    """Print the forecast of a layout, and return the exit code.

    With --with, compare it with a forecast for added cards; with --against, with another layout file.
    """
    if options.added and options.against is not None:
        raise ArgumentError("--with and --against exclude each other; remove one.")
    if options.added and options.layout is not None:
        raise ArgumentError("--with and --layout exclude each other: the layout is found for the cards; remove one.")
    asked = read_inputs(options)
    plan = asked.plan
    # Before a probe, which takes seconds: a file that is refused is refused at once.
    against = None if options.against is None else read_layout(options.against, n_layers=plan.model.n_layers)
    if not plan.violations and options.probe:
        plan = probe(plan)
    elif not plan.violations and plan.report.probe_only is not None:
        plan = _probed_or_known(plan)
    here = _Forecast(plan, asked.explanation)
    if against is not None:
        return _compare(here, against, options)
    if not options.added:
        if options.json:
            print_document(here.document())
        else:
            print_line(here.text())
        return here.exit_code
    rig = with_cards(plan.rig, options.added)
    imagined = plan_request_on(options, plan.model, rig, None)
    there = _Forecast(imagined.plan, imagined.explanation)
    if options.json:
        added = [device for device in rig.devices if plan.rig.device(device.id) is None]
        cards = [{"id": each.id, "name": each.name, "total_bytes": each.total_bytes} for each in added]
        print_document({**there.document(), "added": cards, "here": here.document()})
    else:
        print_line(f"{there.text()}\n\n{compared(here, there)}")
    return there.exit_code


class _Forecast:
    """The forecast of memory and speed for a plan. `document` returns it as JSON, `text` as text for people."""

    def __init__(self, plan: Plan, explanation: str | None) -> None:
        self.plan, self._explanation = plan, explanation
        self.speeds = known_speeds(plan.rig, read_speed_book(speeds_path()))
        self.figures, self._sent = figures_of(plan, self.speeds), plan_sendings(plan, self.speeds)

    @property
    def exit_code(self) -> int:
        if self.plan.violations:
            return exit_codes.ARGUMENT
        return exit_codes.OK if self.plan.report.fits else exit_codes.DOES_NOT_FIT

    def document(self) -> dict[str, object]:
        return plan_document(self.plan, self._explanation, self.figures.speed, self._sent)

    def text(self) -> str:
        return plan_text(self.plan, self._explanation, self.figures.speed, self._sent)


def _compare(here: _Forecast, file: LayoutFile, options: Namespace) -> int:
    """Print the forecast `here`, and its differences from the forecast of the layout in `file`.

    Return the exit code of `here`, which says whether its plan is valid and fits.
    The layout in `file` is planned with the file's settings and draft model, but with the devices, projector and
    adapters of `here`.
    """
    plan = here.plan
    edit = edit_of_file(file, plan.model, options.against.parent, plan.edit.side_files)
    there = _Forecast(plan.with_edit(edit), None)
    if there.plan.report.probe_only is not None and not there.plan.violations:
        there = _Forecast(_probed_or_known(there.plan), None)
    found = compare_plans(plan, there.plan)
    if options.json:
        print_document({**here.document(), "against": there.document(), "differences": found.document()})
    else:
        one, other = side_of(here.plan, here.speeds), side_of(there.plan, there.speeds)
        name = "this layout" if options.layout is None else options.layout.stem
        print_line(f"{here.text()}\n\n{comparison_text(found, one, other, (name, options.against.stem))}")
    return here.exit_code


def compared(here: _Forecast, there: _Forecast) -> str:
    """Return a table for people that compares two forecasts, with a line for each figure.

    `here`: forecast on the present devices. `there`: forecast with the cards of --with added.
    """
    rows = [("", "here", "with the cards"), *zip(FIGURES, here.figures.words(), there.figures.words(), strict=True)]
    widths = [max(len(row[column]) for row in rows) for column in range(3)]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    )


def _probed_or_known(plan: Plan) -> Plan:
    """Return the plan with llama.cpp's own memory sizes, from a probe (load without allocating memory).

    The plan is returned unchanged if this computer lacks one of its local devices, or if a device is in use.
    """
    try:
        return probe(plan)
    except BusyError:
        return plan
    except UnreachableError as error:
        # Without an endpoint, a local device is missing here: its forecast is still of use.
        if error.endpoint is not None:
            raise
        return plan

"""The numbers by which a user compares two layouts of a model, such as layers on the CPU, context length and speed."""

from __future__ import annotations

from msgspec import Struct

from engine.base.language import tr
from engine.devices.device import CPU_ID
from engine.planning.plan.plan import Plan
from engine.planning.plan.preview import plan_speed
from engine.planning.speed.prediction import SpeedForecast
from engine.planning.speed.speeds import Speeds
from engine.planning.speed.work import TokenWork


class Figures(Struct, frozen=True):
    """Numbers of a plan by which the user compares layouts.

    `fits`: whether the plan can be loaded and no device is short of memory.
    `n_host_layers`: number of layers on the CPU, out of `n_layers`.
    `n_ctx`: context length in tokens.
    `speed`: predicted speed of answers; None if it cannot be predicted.
    """

    fits: bool
    n_host_layers: int
    n_layers: int
    n_ctx: int
    speed: SpeedForecast | None

    def words(self) -> tuple[str, ...]:
        """Return one text for each heading in `FIGURES`; the text of an unknown speed is empty."""
        prompt = None if self.speed is None else self.speed.prompt
        return (
            tr("yes") if self.fits else tr("no"),
            tr("{count} of {all}", count=self.n_host_layers, all=self.n_layers),
            str(self.n_ctx),
            "" if self.speed is None else self.speed.text(),
            "" if prompt is None else prompt.text(),
        )


FIGURES = (tr("fits"), tr("layers on the CPU"), tr("context"), tr("answer speed"), tr("prompt speed"))


def figures_of(plan: Plan, speeds: Speeds) -> Figures:
    """Return the numbers of a plan by which layouts are compared, such as context length and speed.

    This computes the plan's memory forecast, if it is not cached.
    """
    layout = plan.edit.layout
    return Figures(
        fits=plan.report.fits,
        n_host_layers=sum(run.last - run.first + 1 for run in layout.runs if run.device == CPU_ID),
        n_layers=layout.n_layers,
        n_ctx=plan.settings.n_ctx,
        speed=plan_speed(TokenWork(plan.model), plan, speeds),
    )

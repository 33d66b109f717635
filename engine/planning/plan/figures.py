"""The figures by which people compare two layouts of a model: does it fit, what is on the CPU, how fast is it."""

from __future__ import annotations

from dataclasses import dataclass

from engine.base.language import tr
from engine.devices.device import CPU_ID
from engine.planning.plan.plan import Plan
from engine.planning.plan.preview import plan_speed
from engine.planning.speed.prediction import SpeedForecast
from engine.planning.speed.speeds import Speeds
from engine.planning.speed.work import Work


@dataclass(frozen=True, slots=True)
class Figures:
    """Figures of a plan. `speed`: None for a plan without a cost model."""

    fits: bool
    n_host_layers: int
    n_layers: int
    n_ctx: int
    speed: SpeedForecast | None

    def words(self) -> tuple[str, ...]:
        """Return a text for each of `FIGURES`."""
        prompt = None if self.speed is None else self.speed.prompt
        return (
            tr("yes") if self.fits else tr("no"),
            tr("{count} of {all}", count=self.n_host_layers, all=self.n_layers),
            str(self.n_ctx),
            "" if self.speed is None else self.speed.text(),
            "" if prompt is None else prompt.text(),
        )


FIGURES = (tr("fits"), tr("layers on the CPU"), tr("context"), tr("answers"), tr("prompts"))


def figures_of(plan: Plan, speeds: Speeds) -> Figures:
    """Return the figures of a plan. Takes as long as a forecast."""
    layout = plan.edit.layout
    return Figures(
        fits=plan.report.fits,
        n_host_layers=sum(run.last - run.first + 1 for run in layout.runs if run.device == CPU_ID),
        n_layers=layout.n_layers,
        n_ctx=plan.settings.n_ctx,
        speed=plan_speed(Work(plan.model), plan, speeds),
    )

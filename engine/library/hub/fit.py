"""Forecasts of the quantisations of a hub repository on a rig, each with a sentence for people."""

from __future__ import annotations

from enum import StrEnum

from msgspec import Struct

from engine.library.hub.listing import HubFile, Quantisation, RepoListing
from engine.model.gguf.model_file import ModelFile
from engine.planning.layout.layout import Layout
from engine.planning.plan.report import DeviceRow
from engine.planning.settings.context_settings import ContextSettings
from engine.planning.speed.speeds import Source


class FitVerdict(StrEnum):
    """Result of a forecast.

    CARDS: the whole model on devices. PARTLY: some weights on the CPU. CPU: the whole model on the CPU.
    NOT: does not fit. UNKNOWN: no forecast is possible.
    """

    CARDS = "cards"
    PARTLY = "partly"
    CPU = "cpu"
    NOT = "not"
    UNKNOWN = "unknown"


class HeaderGrade(StrEnum):
    """Source of a forecast's tensor sizes.

    HEADER: the quantisation's own header. ESTIMATED: another quantisation's header, scaled to the size of the files.
    """

    HEADER = "header"
    ESTIMATED = "estimated"


class QuantisationFit(Struct, frozen=True):
    """The forecast of one quantisation of a repository. Speeds are in tokens per second.

    `verdict`: where the quantisation fits.
    `grade`: whether tensor sizes are from the quantisation's own header, or scaled from another one.
    `sentence`: the result as a text for people, or the reason why no forecast is possible.
    `n_layers_on_cpu`, `n_layers`: number of layers on the CPU, and of all layers.
    `n_experts_on_cpu`: number of layers that are on a device, but whose experts are on the CPU.
    `n_ctx`: context length in tokens.
    `context`: context settings of the layout, None if there is no layout.
    `rows`: memory of each device, as in a plan.
    `tokens_per_second`: slowest and fastest predicted speed, None if there is no prediction.
    `expected_per_second`: predicted speed of an answer of usual length; 0 if there is no prediction.
    `speed_source`: where the speeds of the devices come from, such as measurements. If the sources differ, it is the
    least reliable one; devices that hardly affect `expected_per_second` are ignored.
    `projector`: the projector whose memory is counted, None if none is.
    """

    quantisation: Quantisation
    verdict: FitVerdict
    grade: HeaderGrade
    sentence: str
    n_layers: int = 0
    n_layers_on_cpu: int = 0
    n_experts_on_cpu: int = 0
    n_ctx: int = 0
    layout: Layout | None = None
    context: ContextSettings | None = None
    rows: tuple[DeviceRow, ...] = ()
    tokens_per_second: tuple[float, float] | None = None
    expected_per_second: float = 0.0
    speed_source: Source = "guess"
    projector: HubFile | None = None

    @property
    def fits(self) -> bool:
        return self.verdict in (FitVerdict.CARDS, FitVerdict.PARTLY, FitVerdict.CPU)

    @property
    def need_bytes(self) -> int:
        """Bytes needed on all devices together, including weights that are mapped from the file."""
        return sum(row.need_bytes + row.mapped_bytes for row in self.rows)


class RepoFit(Struct, frozen=True):
    """Forecasts of all quantisations of a repository.

    `model`: the header that the forecasts are based on.
    `best`: name of the quantisation that the user is advised to download, None if none fits.
    `why`: one sentence with the reason for `best`, or why none fits.
    """

    listing: RepoListing
    model: ModelFile
    fits: tuple[QuantisationFit, ...]
    best: str | None
    why: str

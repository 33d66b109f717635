"""Forecasts of the quantisations of a repository on a rig, as values with a sentence each."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from engine.library.hub.listing import HubFile, Quantisation, RepoListing
from engine.model.gguf.model_file import ModelFile
from engine.planning.layout.layout import Layout
from engine.planning.plan.report import DeviceRow
from engine.planning.settings.context_settings import ContextSettings
from engine.planning.speed.speeds import Source


class FitVerdict(StrEnum):
    """Result of a forecast: on GPUs only, partly on the CPU, on the CPU of a rig without devices, or not at all."""

    CARDS = "cards"
    PARTLY = "partly"
    CPU = "cpu"
    NOT = "not"
    UNKNOWN = "unknown"


class HeaderGrade(StrEnum):
    """Source of the tensor sizes: the quantisation's own header, or another header scaled to the size of the files."""

    HEADER = "header"
    ESTIMATED = "estimated"


@dataclass(frozen=True, slots=True)
class QuantisationFit:
    """The forecast of one quantisation.

    `sentence`: the verdict for people; if it is unknown, the reason, and there is no layout.
    `n_layers_on_cpu`: number of layers, of `n_layers`, that are on the CPU.
    `n_experts_on_cpu`: number of layers of which only the experts are on the CPU.
    `n_ctx`: context length in tokens.
    `context`: the settings that were asked for.
    `rows`: memory of each device, as in a plan.
    `tokens_per_second`: slowest and fastest predicted speed.
    `expected_per_second`: speed of an answer of usual length, between those two; 0 if there is no prediction.
    `projector`: the projector that is counted, None if none is.
    `speed_source`: the least sure source among the devices that matter for `expected_per_second`.
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
    explanation: str = ""
    expected_per_second: float = 0.0
    speed_source: Source = "guess"
    projector: HubFile | None = None

    @property
    def fits(self) -> bool:
        return self.verdict in (FitVerdict.CARDS, FitVerdict.PARTLY, FitVerdict.CPU)

    @property
    def need_bytes(self) -> int:
        """Bytes needed on all devices together, including the mapped part of the file."""
        return sum(row.need_bytes + row.mapped_bytes for row in self.rows)


@dataclass(frozen=True, slots=True)
class RepoFit:
    """Forecasts of a repository.

    `best`: name of the proposed quantisation, None if none fits. `why`: the reason, one sentence.
    """

    listing: RepoListing
    model: ModelFile
    fits: tuple[QuantisationFit, ...]
    best: str | None
    why: str

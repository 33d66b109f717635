"""How what a repository offers would fit a rig, as values with a sentence each."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from engine.library.hub.listing import Quantisation, RepoListing
from engine.model.gguf.model_file import ModelFile
from engine.planning.layout.layout import Layout
from engine.planning.plan.report import DeviceRow
from engine.planning.settings.context_settings import ContextSettings


class FitVerdict(StrEnum):
    """How a model fits: on the cards alone, with a part on the CPU, on a rig's CPU alone, or not at all."""

    CARDS = "cards"
    PARTLY = "partly"
    CPU = "cpu"
    NOT = "not"
    UNKNOWN = "unknown"


class HeaderGrade(StrEnum):
    """Where a forecast's weights come from: this quantisation's own header, or another's and the size of the files."""

    HEADER = "header"
    ESTIMATED = "estimated"


@dataclass(frozen=True, slots=True)
class QuantisationFit:
    """The forecast of one quantisation. `n_layers_on_cpu` of `n_layers`; `n_experts_on_cpu`: layers whose experts
    alone are there; `n_ctx` in tokens; `context` as asked for; `rows` as a plan has them; `tokens_per_second`
    slowest and fastest that is predicted. `sentence` is the verdict for people; where it is unknown it says why, and
    there is no layout.
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

    @property
    def fits(self) -> bool:
        return self.verdict in (FitVerdict.CARDS, FitVerdict.PARTLY, FitVerdict.CPU)

    @property
    def need_bytes(self) -> int:
        """What it takes on all devices together, the mapped part of the file included."""
        return sum(row.need_bytes + row.mapped_bytes for row in self.rows)


@dataclass(frozen=True, slots=True)
class RepoFit:
    """A repository on a rig. `best` is the name of the quantisation that is proposed, None where none fits; `why` is
    one sentence in either case."""

    listing: RepoListing
    model: ModelFile
    fits: tuple[QuantisationFit, ...]
    best: str | None
    why: str

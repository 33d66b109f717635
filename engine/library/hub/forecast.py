"""How every quantisation of a repository would fit a rig, before a byte of weights is fetched.

One header is read. Its own quantisation is planned as a file would be; the others are planned from the same header with
their tensors scaled to the size of their files, which is what their grade "estimated" says. `fit_repo` begins with an
address, `fit_listing` with a listing, `forecast_repo` with a header.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from engine.base.language import tr, tr_count
from engine.base.units import format_bytes
from engine.devices.device import CPU_ID, Rig
from engine.library.hub.addresses import HubAddress
from engine.library.hub.client import list_repo
from engine.library.hub.fit import FitVerdict, HeaderGrade, QuantisationFit, RepoFit
from engine.library.hub.listing import PREFERRED_TAGS, Quantisation, RepoListing
from engine.library.hub.remote_header import HeaderCache, read_remote_model
from engine.library.hub.settings import HubSettings
from engine.model.gguf.model_file import ModelFile, TensorInfo, group_blocks
from engine.planning.fit.strategies.catalogue import auto_layout
from engine.planning.fit.strategies.constraints import NO_CONSTRAINTS, AutoLayout, Constraints
from engine.planning.fit.strategies.fastest import predict_layout
from engine.planning.layout.layout import Layout
from engine.planning.memory.model_memory import ModelMemory
from engine.planning.plan.edit import Edit
from engine.planning.plan.plan import Plan
from engine.planning.settings.context_settings import ContextSettings

GOOD_BITS = 4
"""Below this many bits a weight loses noticeably; above `PLENTY_BITS` hardly anybody sees a difference."""
PLENTY_BITS = 8
_UNSCALED = ("F32", "F64", "I8", "I16", "I32", "I64")
"""Types that stay as they are in every quantisation of a model: norms, biases, tables."""


_DEFAULTS = ContextSettings()


@dataclass(frozen=True, slots=True)
class FitWish:
    """What a forecast is for: the rig, the favourite strategy, the context asked for, and the strategy's limits."""

    rig: Rig
    strategy: str = "fewest"
    context: ContextSettings = _DEFAULTS
    constraints: Constraints = NO_CONSTRAINTS


def forecast_repo(
    listing: RepoListing, read: Quantisation, model: ModelFile, wish: FitWish, tell: Callable[[int], None] | None = None
) -> RepoFit:
    """Return how all quantisations of `listing` fit; `model` is the header of `read`. `tell` hears how many are done.

    Raises:
        CancelledError: `wish.constraints.watch` says that nobody waits any more.
    """
    fits: list[QuantisationFit] = []
    for each in listing.quantisations:
        if each.name == read.name:
            fits.append(forecast(each, model, HeaderGrade.HEADER, wish))
        else:
            fits.append(forecast(each, scaled_model(model, each), HeaderGrade.ESTIMATED, wish))
        if tell is not None:
            tell(len(fits))
    best, why = propose(fits)
    return RepoFit(listing, model, tuple(fits), best, why)


def forecast(quantisation: Quantisation, model: ModelFile, grade: HeaderGrade, wish: FitWish) -> QuantisationFit:
    """Return how one quantisation fits; raises as `forecast_repo`."""
    memory = ModelMemory(model)
    found = auto_layout(wish.strategy, memory, wish.rig, wish.context, wish.constraints)
    plan = Plan(memory, wish.rig, Edit(found.layout, found.context, wish.constraints.side_files))
    if plan.report.probe_only is not None:
        sentence = tr("Nobody can tell before it is here: {probe_only}", probe_only=plan.report.probe_only)
        return QuantisationFit(quantisation, FitVerdict.UNKNOWN, grade, sentence, model.n_layers)
    on_cpu = sum(run.length for run in found.layout.runs if run.device == CPU_ID)
    experts = _experts_on_cpu(found.layout)
    verdict = _verdict(plan, found, on_cpu, experts)
    prediction = predict_layout(memory, wish.rig, found.layout, plan.settings, wish.constraints.speeds)
    return QuantisationFit(
        quantisation=quantisation,
        verdict=verdict,
        grade=grade,
        sentence=_sentence(plan, verdict, on_cpu, experts),
        n_layers=model.n_layers,
        n_layers_on_cpu=on_cpu,
        n_experts_on_cpu=experts,
        n_ctx=plan.settings.n_ctx if isinstance(plan.settings.n_ctx, int) else 0,
        layout=found.layout,
        context=found.context,
        rows=plan.report.rows,
        tokens_per_second=(1 / prediction.worst_s, 1 / prediction.best_s),
        explanation=found.explanation,
    )


def scaled_model(model: ModelFile, quantisation: Quantisation) -> ModelFile:
    """Return `model` with its quantised tensors made as large as the files of `quantisation` say they are."""
    fixed = sum(tensor.size_bytes for tensor in model.tensors if tensor.type_name in _UNSCALED)
    quantised = sum(tensor.size_bytes for tensor in model.tensors) - fixed
    overhead = max(0, model.size_bytes - fixed - quantised)
    ratio = max(0.0, quantisation.size_bytes - overhead - fixed) / max(1, quantised)

    def scaled(tensor: TensorInfo) -> TensorInfo:
        if tensor.type_name in _UNSCALED:
            return tensor
        return replace(tensor, size_bytes=round(tensor.size_bytes * ratio))

    tensors = tuple(map(scaled, model.tensors))
    blocks, outside = group_blocks(tensors, model.n_layers)
    return replace(
        model,
        paths=tuple(Path(file.path) for file in quantisation.files),
        tensors=tensors,
        blocks=blocks,
        global_tensors=outside,
        size_bytes=quantisation.size_bytes,
    )


def propose(fits: list[QuantisationFit]) -> tuple[str | None, str]:
    """Return the name of the best choice among `fits`, and why.

    The largest of at most 8 bits that fits on the cards alone; without cards, or where only poor ones do, one of about
    4 bits; else the one that leaves the fewest layers on the CPU.
    """
    sensible = [fit for fit in fits if fit.fits and fit.quantisation.bits <= PLENTY_BITS] or [
        fit for fit in fits if fit.fits
    ]
    if not sensible:
        return None, _why_none(fits)
    on_cards = [fit for fit in sensible if fit.verdict is FitVerdict.CARDS]
    good = [fit for fit in on_cards if fit.quantisation.bits >= GOOD_BITS or not fit.quantisation.bits]
    if good:
        best = max(good, key=lambda fit: fit.quantisation.size_bytes)
        return best.quantisation.name, tr(
            "{label} is the most exact one that fits on the cards alone.", label=best.quantisation.label
        )
    enough = [fit for fit in sensible if fit.quantisation.bits >= GOOD_BITS]
    if enough:
        best = min(enough, key=_cost)
        if best.verdict is FitVerdict.CPU:
            why = tr("is exact enough, and the less there is to read for a token, the faster a CPU is.")
        else:
            why = tr("is exact enough and leaves the least on the CPU ({left_on_cpu}).", left_on_cpu=_left_on_cpu(best))
        return best.quantisation.name, f"{best.quantisation.label} {why}"
    best = max(sensible, key=lambda fit: (fit.verdict is FitVerdict.CARDS, fit.quantisation.size_bytes))
    return best.quantisation.name, (
        tr(
            "{label} is the most exact one that fits; a smaller model with more bits may answer better.",
            label=best.quantisation.label,
        )
    )


def _cost(fit: QuantisationFit) -> tuple[int, int, bool, int]:
    preferred = fit.quantisation.tag in PREFERRED_TAGS
    if fit.verdict is FitVerdict.CPU:
        return 0, 0, not preferred, fit.quantisation.size_bytes
    return fit.n_layers_on_cpu, fit.n_experts_on_cpu, not preferred, fit.quantisation.size_bytes


def _why_none(fits: list[QuantisationFit]) -> str:
    if not fits:
        return tr("There is no model in this repository.")
    if all(fit.verdict is FitVerdict.UNKNOWN for fit in fits):
        return fits[0].sentence
    smallest = min(fits, key=lambda fit: fit.quantisation.size_bytes)
    return tr(
        "None fits: even {label} takes {need} with its context. Look for a smaller model, or add a device.",
        label=smallest.quantisation.label,
        need=format_bytes(smallest.need_bytes),
    )


def _verdict(plan: Plan, found: AutoLayout, on_cpu: int, experts: int) -> FitVerdict:
    report = plan.report
    host = report.rows[-1]
    # Weights on the CPU are mapped from the file and need no memory to load; but read from disk for every token
    # nobody would call that a fit.
    is_short = host.mapped_bytes > 0 and host.shortfall_bytes + host.mapped_bytes > 0
    if not report.fits or not found.fits or is_short:
        return FitVerdict.NOT
    if not on_cpu and not experts:
        return FitVerdict.CARDS
    uses_cards = any(row.need_bytes for row in report.rows[:-1])
    return FitVerdict.PARTLY if uses_cards else FitVerdict.CPU


def _sentence(plan: Plan, verdict: FitVerdict, on_cpu: int, experts: int) -> str:
    if verdict is FitVerdict.CARDS:
        return tr("Fits on the cards.")
    if verdict is FitVerdict.CPU:
        return tr("Fits on the CPU.")
    if verdict is FitVerdict.PARTLY:
        return tr("Fits with {on_cpu} on the CPU.", on_cpu=_on_cpu_words(on_cpu, experts))
    rows = plan.report.rows
    short = sum(max(0, row.shortfall_bytes + row.mapped_bytes) for row in rows if row.need_bytes or row.mapped_bytes)
    if plan.violations:
        return tr("Does not fit: {message}", message=plan.violations[0].message)
    return tr("Does not fit: {short} short.", short=format_bytes(short)) if short else tr("Does not fit.")


def _left_on_cpu(fit: QuantisationFit) -> str:
    return _on_cpu_words(fit.n_layers_on_cpu, fit.n_experts_on_cpu)


def _on_cpu_words(layers: int, experts: int) -> str:
    parts = [tr_count("{count} layer", "{count} layers", layers)] if layers else []
    if experts:
        parts.append(tr_count("the experts of {count} layer", "the experts of {count} layers", experts))
    return tr(" and ").join(parts) or tr("nothing")


def _experts_on_cpu(layout: Layout) -> int:
    """Return how many layers that are elsewhere have weights on the CPU by an override."""
    layers: set[int] = set()
    for override in layout.overrides:
        if override.device == CPU_ID:
            layers.update(override.layers or range(layout.n_layers))
    return len([layer for layer in layers if layout.device_of(layer) != CPU_ID])


def fit_repo(
    address: HubAddress,
    hub: HubSettings,
    token: str | None,
    cache: HeaderCache | None,
    wish_of: Callable[[ModelFile], FitWish],
    tell: Callable[[int], None] | None = None,
) -> RepoFit:
    """Return how the quantisations at `address` fit. The one that it names is read, else the preferred one.

    `wish_of` says for a model what it is to be planned for; `tell` hears how many quantisations are done.

    Raises:
        HubError: where the hub does not give what is asked for.
        ArgumentError: where there is no such quantisation, or no model.
        ModelFileError: for what is no model.
        CancelledError: the wish's watch says that nobody waits any more.
    """
    listing = list_repo(address.repo, hub, token, revision=address.revision)
    return fit_listing(listing, address, hub, token, cache, wish_of, tell)


def fit_listing(
    listing: RepoListing,
    address: HubAddress,
    hub: HubSettings,
    token: str | None,
    cache: HeaderCache | None,
    wish_of: Callable[[ModelFile], FitWish],
    tell: Callable[[int], None] | None = None,
) -> RepoFit:
    """Return the same for a repository whose files are known; raises as `fit_repo`."""
    read = listing.find(address.quantisation, address.path)
    model = read_remote_model(listing, read, hub, cache, token)
    return forecast_repo(listing, read, model, wish_of(model), tell)

"""Forecasts every quantisation of a repository on a rig, before any weights are downloaded.

The header of one quantisation is read, and this quantisation is planned like a local file. The other quantisations are
planned from the same header, with its tensors scaled to the size of their files (grade "estimated"). `fit_listing`
starts from a listing, `forecast_repo` from a header.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from msgspec import Struct

from engine.base.language import tr, tr_count
from engine.base.units import format_bytes
from engine.base.values import replace
from engine.devices.device import CPU_ID, Rig
from engine.library.fitting import predict_speed
from engine.library.hub.addresses import HubAddress
from engine.library.hub.fit import FitVerdict, HeaderGrade, QuantisationFit, RepoFit
from engine.library.hub.listing import PREFERRED_TAGS, HubFile, Quantisation, RepoListing
from engine.library.hub.remote_header import HeaderCache, read_remote_model
from engine.library.hub.settings import HubSettings
from engine.model.gguf.model_file import ModelFile, TensorInfo, group_blocks
from engine.planning.fit.strategies.catalogue import auto_layout
from engine.planning.fit.strategies.constraints import NO_CONSTRAINTS, AutoLayout, Constraints
from engine.planning.layout.layout import Layout
from engine.planning.memory.model_memory import ModelMemory
from engine.planning.memory.side_files import Projector, SideFiles
from engine.planning.plan.edit import Edit
from engine.planning.plan.plan import Plan
from engine.planning.settings.context_settings import ContextSettings

# Bits per weight. With fewer, answers become noticeably worse; above `PLENTY_BITS` there is hardly a difference.
GOOD_BITS = 4
PLENTY_BITS = 8
# Types with the same size in every quantisation of a model: norms, biases, tables.
_UNSCALED = ("F32", "F64", "I8", "I16", "I32", "I64")


_DEFAULTS = ContextSettings()


class FitOptions(Struct, frozen=True):
    """Conditions of a forecast: rig, strategy, context settings, and constraints of the strategy.

    `text_only`: whether to leave out the memory of the projector that belongs to a quantisation.
    """

    rig: Rig
    strategy: str = "fewest"
    context: ContextSettings = _DEFAULTS
    constraints: Constraints = NO_CONSTRAINTS
    text_only: bool = False


def forecast_repo(
    listing: RepoListing,
    read: Quantisation,
    model: ModelFile,
    options: FitOptions,
    on_progress: Callable[[int], None] | None = None,
) -> RepoFit:
    """Return the forecasts of all quantisations of `listing`.

    `read`: the quantisation whose header was read.
    `model`: the model in that header.
    `on_progress`: called with the number of forecasts done.

    Raises:
        CancelledError: if `options.constraints.watch` is cancelled.
    """
    fits: list[QuantisationFit] = []
    for each in listing.quantisations:
        projector = None if options.text_only else listing.projector_of(each)
        if each.name == read.name:
            fits.append(forecast(each, model, HeaderGrade.HEADER, options, projector))
        else:
            fits.append(forecast(each, scaled_model(model, each), HeaderGrade.ESTIMATED, options, projector))
        if on_progress is not None:
            on_progress(len(fits))
    best, why = propose(fits)
    return RepoFit(listing, model, tuple(fits), best, why)


def forecast(
    quantisation: Quantisation,
    model: ModelFile,
    grade: HeaderGrade,
    options: FitOptions,
    projector: HubFile | None = None,
) -> QuantisationFit:
    """Return the forecast of one quantisation.

    `model`: header of the quantisation, or that of another one with tensor sizes scaled to this quantisation.
    `grade`: whether the tensor sizes in `model` are the quantisation's own, or scaled ones.
    `projector`: the projector whose memory is counted, None for none.

    Raises:
        CancelledError: if `options.constraints.watch` is cancelled.
    """
    memory = ModelMemory(model)
    side_files = options.constraints.side_files if projector is None else SideFiles(_sized_projector(projector))
    constraints = replace(options.constraints, side_files=side_files)
    found = auto_layout(options.strategy, memory, options.rig, options.context, constraints)
    plan = Plan(memory, options.rig, Edit(found.layout, found.context, side_files))
    if plan.report.probe_only is not None:
        sentence = tr("The memory is not known before the download: {probe_only}", probe_only=plan.report.probe_only)
        return QuantisationFit(quantisation, FitVerdict.UNKNOWN, grade, sentence, model.n_layers, projector=projector)
    on_cpu = sum(run.length for run in found.layout.runs if run.device == CPU_ID)
    experts = _experts_on_cpu(found.layout)
    verdict = _verdict(plan, found, on_cpu, experts)
    speed, bounds = predict_speed(memory, options.rig, found.layout, plan.settings, options.constraints.speeds)
    return QuantisationFit(
        quantisation=quantisation,
        verdict=verdict,
        grade=grade,
        sentence=_sentence(plan, verdict, on_cpu, experts) + _projector_sentence(projector),
        n_layers=model.n_layers,
        n_layers_on_cpu=on_cpu,
        n_experts_on_cpu=experts,
        n_ctx=plan.settings.n_ctx if isinstance(plan.settings.n_ctx, int) else 0,
        layout=found.layout,
        context=found.context,
        rows=plan.report.rows,
        tokens_per_second=(1 / bounds.worst_s, 1 / bounds.best_s),
        expected_per_second=speed.tokens_per_second,
        speed_source=speed.source,
        projector=projector,
    )


def _sized_projector(file: HubFile) -> Projector:
    """Return a projector with one tensor as large as `file`. Nearly all bytes of a projector's file are tensors.

    The file's header is not read: that would be one more request to the hub for some kilobytes of difference.
    """
    size_bytes = file.size_bytes
    # I8 has one byte per element, so the number of elements is the size.
    return Projector(Path(file.path), (TensorInfo(file.name, (size_bytes,), "I8", size_bytes, 0, 0),))


def _projector_sentence(projector: HubFile | None) -> str:
    if projector is None:
        return ""
    return tr(" The forecast includes the projector ({size}).", size=format_bytes(projector.size_bytes))


def scaled_model(model: ModelFile, quantisation: Quantisation) -> ModelFile:
    """Return `model` with its quantised tensors scaled so that its size is that of the files of `quantisation`."""
    # File size = overhead (header, alignment) + unscaled tensors + quantised tensors. Only the last part is scaled.
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
    """Return (name of the best quantisation, sentence with the reason); the name is None if no quantisation fits.

    The first of these rules that finds a quantisation decides. Quantisations of more than 8 bits per weight are
    considered only if no other quantisation fits.
    1. The largest quantisation of at least 4 bits per weight that fits on the GPUs.
    2. The quantisation of at least 4 bits per weight with the fewest layers on the CPU.
    3. The largest quantisation that fits, preferably on the GPUs.
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
            "{label} is the best quantisation that fits on the GPUs.", label=best.quantisation.label
        )
    enough = [fit for fit in sensible if fit.quantisation.bits >= GOOD_BITS]
    if enough:
        best = min(enough, key=_cost)
        if best.verdict is FitVerdict.CPU:
            why = tr(
                "{label} has at least 4 bits per weight, and is the fastest on the CPU because it reads the fewest "
                "bytes per token.",
                label=best.quantisation.label,
            )
        else:
            why = tr(
                "{label} has at least 4 bits per weight, and puts the smallest part on the CPU ({left_on_cpu}).",
                label=best.quantisation.label,
                left_on_cpu=_left_on_cpu(best),
            )
        return best.quantisation.name, why
    best = max(sensible, key=lambda fit: (fit.verdict is FitVerdict.CARDS, fit.quantisation.size_bytes))
    return best.quantisation.name, (
        tr(
            "{label} is the best quantisation that fits. A smaller model with more bits per weight may answer better.",
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
        return tr("This repository contains no models.")
    if all(fit.verdict is FitVerdict.UNKNOWN for fit in fits):
        return fits[0].sentence
    smallest = min(fits, key=lambda fit: fit.quantisation.size_bytes)
    return tr(
        "No quantisation fits: even {label} needs {need} including the context. Choose a smaller model or add a "
        "device.",
        label=smallest.quantisation.label,
        need=format_bytes(smallest.need_bytes),
    )


def _verdict(plan: Plan, found: AutoLayout, on_cpu: int, experts: int) -> FitVerdict:
    report = plan.report
    host = report.rows[-1]
    # Weights on the CPU are mapped from the file, so they need no memory to load. If they exceed the memory, they are
    # read from the disk for each token, which does not count as a fit.
    is_short = host.mapped_bytes > 0 and host.shortfall_bytes + host.mapped_bytes > 0
    if not report.fits or not found.fits or is_short:
        return FitVerdict.NOT
    if not on_cpu and not experts:
        return FitVerdict.CARDS
    uses_cards = any(row.need_bytes for row in report.rows[:-1])
    return FitVerdict.PARTLY if uses_cards else FitVerdict.CPU


def _sentence(plan: Plan, verdict: FitVerdict, on_cpu: int, experts: int) -> str:
    if verdict is FitVerdict.CARDS:
        return tr("Fits on the GPUs.")
    if verdict is FitVerdict.CPU:
        return tr("Fits on the CPU.")
    if verdict is FitVerdict.PARTLY:
        return tr("Fits with {on_cpu} on the CPU.", on_cpu=_on_cpu_text(on_cpu, experts))
    rows = plan.report.rows
    short = sum(max(0, row.shortfall_bytes + row.mapped_bytes) for row in rows if row.need_bytes or row.mapped_bytes)
    if plan.violations:
        return tr("Does not fit: {message}", message=plan.violations[0].message)
    return tr("Does not fit: short by {short}.", short=format_bytes(short)) if short else tr("Does not fit.")


def _left_on_cpu(fit: QuantisationFit) -> str:
    return _on_cpu_text(fit.n_layers_on_cpu, fit.n_experts_on_cpu)


def _on_cpu_text(layers: int, experts: int) -> str:
    parts = [tr_count("{count} layer", "{count} layers", layers)] if layers else []
    if experts:
        parts.append(tr_count("the experts of {count} layer", "the experts of {count} layers", experts))
    return tr(" and ").join(parts) or tr("nothing")


def _experts_on_cpu(layout: Layout) -> int:
    """Return the number of layers that are on a device, but whose experts an override keeps on the CPU."""
    layers: set[int] = set()
    for override in layout.overrides:
        if override.device == CPU_ID:
            layers.update(override.layers or range(layout.n_layers))
    return len([layer for layer in layers if layout.device_of(layer) != CPU_ID])


def fit_listing(
    listing: RepoListing,
    address: HubAddress,
    hub: HubSettings,
    token: str | None,
    cache: HeaderCache | None,
    options_of: Callable[[ModelFile], FitOptions],
    on_progress: Callable[[int], None] | None = None,
) -> RepoFit:
    """Return the forecasts of the repository whose files `listing` lists. Waits for the network.

    The header of the quantisation in `address` is read, or that of the preferred quantisation if `address` has none.

    `cache`: cache of headers, None for no cache.
    `options_of`: returns the conditions of the forecast for a model.
    `on_progress`: called with the number of forecasts done.

    Raises:
        HubError: if the hub refuses or does not answer.
        ArgumentError: if the repository lacks the quantisation, or has no model.
        ModelFileError: if the file is not a model.
        CancelledError: if `constraints.watch` in the options is cancelled.
    """
    read = listing.find(address.quantisation, address.path)
    model = read_remote_model(listing, read, hub, cache, token)
    return forecast_repo(listing, read, model, options_of(model), on_progress)

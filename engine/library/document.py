"""The list of models that `layerdeck-cli library` prints: as JSON (defined in `docs/contract.md`), and as text."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from msgspec import Struct

from engine.base.units import format_bytes
from engine.library.census import Census
from engine.library.entry import Entry, Quantisation
from engine.library.fit import Fit, fit_text, projector_text, sourced_speed_text
from engine.library.listed import Listed
from engine.planning.speed.speeds import Source
from engine.planning.speed.texts import predicted_rate_text, rate_text


class FitDocument(Struct, frozen=True, kw_only=True):
    """JSON: the forecast of a quantisation on the rig. Speeds are in tokens per second, null if there is no prediction.

    `kind`: result of the forecast, one of `FitKind`.
    `n_ctx`: context length in tokens.
    `layers`: number of layers by device id.
    `slowest`, `fastest`: bounds of the predicted speed.
    `tokens_per_second`: predicted speed of an answer of usual length, between these bounds.
    `source`: source of the prediction, which determines its reliability; null if there is no prediction.
    `projector`: file name of the projector whose memory is counted, null if there is none.
    `uncertainty`: relative error of `tokens_per_second` that nine of ten predictions do not exceed, null if unknown.
    """

    kind: str
    strategy: str
    n_ctx: int
    layers: dict[str, int]
    slowest: float | None
    fastest: float | None
    reason: str
    tokens_per_second: float | None
    source: Source | None
    projector: str | None = None
    uncertainty: float | None = None


class CopyDocument(Struct, frozen=True, kw_only=True):
    """JSON: one copy of a quantisation on the disk.

    `owner`: name of the program whose store has the copy, empty for folders that the user added.
    `parts`: paths of the parts in order.
    """

    owner: str
    parts: tuple[str, ...]


class MeasuredDocument(Struct, frozen=True, kw_only=True):
    """JSON: the measured speed of the last long answer that this quantisation of a model has generated.

    `devices`: ids of the devices that held the model.
    `same_layout`: whether the model was loaded with the layout that the forecast (`fit`) proposes.
    """

    tokens_per_second: float
    devices: tuple[str, ...]
    same_layout: bool


class QuantisationDocument(Struct, frozen=True, kw_only=True):
    """JSON: one quantisation of a model.

    `fault`: reason why the quantisation cannot be opened, null if none is known.
    `fit`: the forecast, null unless a forecast was requested.
    `measured`: the measured speed, null if there is none.
    """

    quantisation: str
    size_bytes: int
    copies: tuple[CopyDocument, ...]
    n_parameters: int | None
    fault: str | None
    fit: FitDocument | None
    measured: MeasuredDocument | None


class SideFileDocument(Struct, frozen=True, kw_only=True):
    """JSON: a file that belongs to a model. `role`: "projector", "draft", "adapter" or "imatrix"."""

    role: str
    path: str
    size_bytes: int


class ModelDocument(Struct, frozen=True, kw_only=True):
    """JSON: one model of the library. Fields are null if no header was read or the header lacks the value."""

    name: str
    architecture: str | None
    n_layer: int | None
    n_ctx_train: int | None
    capabilities: tuple[str, ...]
    favourite: bool
    tags: tuple[str, ...]
    quantisations: tuple[QuantisationDocument, ...]
    side_files: tuple[SideFileDocument, ...]


class StoreDocument(Struct, frozen=True, kw_only=True):
    """JSON: a scanned folder (store). `owner`: program whose folder it is; empty for folders that the user added."""

    kind: str
    owner: str
    path: str
    n_files: int


class LibraryDocument(Struct, frozen=True, kw_only=True):
    """JSON: the whole `library` document. `problems`: a sentence for each folder or file that could not be scanned."""

    stores: tuple[StoreDocument, ...]
    models: tuple[ModelDocument, ...]
    problems: tuple[str, ...]


def library_document(census: Census, models: Iterable[Listed]) -> LibraryDocument:
    """Return the `library` document. Scanned folders without models are left out, unless the user added them."""
    counts = {store: sum(file.store == store for file in census.files) for store in census.stores}
    return LibraryDocument(
        stores=tuple(
            StoreDocument(kind=store.kind, owner=store.owner, path=str(store.root), n_files=count)
            for store, count in counts.items()
            if count or store.is_ours
        ),
        models=tuple(map(_model, models)),
        problems=tuple(problem.sentence for problem in census.problems),
    )


def _model(model: Listed) -> ModelDocument:
    entry, facts = model.entry, model.entry.facts
    return ModelDocument(
        name=entry.title,
        architecture=facts.architecture if facts is not None else None,
        n_layer=facts.n_layers if facts is not None else None,
        n_ctx_train=facts.n_ctx_train if facts is not None else None,
        capabilities=entry.capabilities,
        favourite=model.notes.is_favourite,
        tags=model.notes.tags,
        quantisations=tuple(_quantisation(model, each) for each in entry.quantisations),
        side_files=_side_files(entry),
    )


def _quantisation(model: Listed, each: Quantisation) -> QuantisationDocument:
    fit = model.fit_of(each)
    return QuantisationDocument(
        quantisation=each.label,
        size_bytes=each.size_bytes,
        copies=tuple(
            CopyDocument(owner=copy.first.store.owner, parts=tuple(map(str, copy.paths))) for copy in each.copies
        ),
        n_parameters=each.facts.n_parameters if each.facts is not None else None,
        fault=each.fault or None,
        fit=None if fit is None else _fit(fit),
        measured=_measured(model, each),
    )


def _measured(model: Listed, each: Quantisation) -> MeasuredDocument | None:
    notes = model.notes_of(each)
    if not notes.measured:
        return None
    return MeasuredDocument(
        tokens_per_second=round(notes.measured, 2),
        devices=tuple(filter(None, notes.measured_on.split(", "))),
        same_layout=model.measured_of(each) > 0,
    )


def _fit(fit: Fit) -> FitDocument:
    return FitDocument(
        kind=fit.kind,
        strategy=fit.strategy,
        n_ctx=fit.n_ctx,
        layers=dict(fit.layers),
        slowest=fit.slowest or None,
        fastest=fit.fastest or None,
        reason=fit.reason,
        tokens_per_second=fit.speed if fit.fits and fit.speed else None,
        source=fit.source if fit.fits and fit.speed else None,
        projector=fit.projector or None,
        uncertainty=fit.uncertainty or None if fit.fits and fit.speed else None,
    )


def _side_files(entry: Entry) -> tuple[SideFileDocument, ...]:
    return tuple(
        SideFileDocument(role=side.role, path=str(side.file.path), size_bytes=side.file.size_bytes)
        for side in entry.side_files
    )


def library_text(models: Sequence[Listed]) -> str:
    """Return the list of models as text: a line for each model, each of its quantisations and each copy."""
    lines = [line for model in models for line in _lines(model)]
    if not models:
        lines.append("No models found. Add a folder with --folder DIR.")
    return "\n".join(lines)


def _speed(model: Listed, each: Quantisation, fit: Fit) -> str:
    measured, predicted = model.measured_of(each), sourced_speed_text(fit)
    if not measured:
        return predicted
    return f"{rate_text(measured)} tokens/s measured (predicted {predicted_rate_text(fit.speed)})"


def _lines(model: Listed) -> Iterable[str]:
    facts = model.entry.facts
    parts = [facts.architecture if facts is not None else "", *model.entry.capabilities, *model.notes.tags]
    yield f"{model.entry.title}  ({', '.join(filter(None, parts))})" if any(parts) else model.entry.title
    for each in model.entry.quantisations:
        fit = model.fit_of(each)
        words = [f"{each.label or 'unknown':<10}", f"{format_bytes(each.size_bytes):>10}"]
        if each.fault:
            words.append(each.fault)
        elif fit is not None:
            words += [fit_text(fit), projector_text(fit), _speed(model, each, fit)]
        yield "  " + "  ".join(filter(None, words)).rstrip()
        for copy in each.copies:
            owner = f" ({copy.first.store.label})" if copy.first.store.label else ""
            yield f"    {copy.path}{owner}"
    for side in model.entry.side_files:
        yield f"  {side.role}: {side.file.path}"

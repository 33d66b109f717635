"""What the list and the details say of a model, in words."""

from __future__ import annotations

from dataclasses import dataclass

from engine.base.language import tr
from engine.base.texts import capitalised
from engine.base.units import format_bytes
from engine.library.capabilities import CAPABILITY_WORDS
from engine.library.entry import Quantisation
from engine.library.fit import Fit, fit_words, place_words, speed_words
from engine.library.listed import Listed
from widgets.common.counts import format_count

_GOOD, _FAIR, _BAD, _DIM = "good", "experts", "bad", "dim"
_COLOURS = {"devices": _GOOD, "split": _FAIR, "cpu": _GOOD, "disk": _BAD, "no": _BAD, "unknown": _DIM}
_SIDE_WORDS = {
    "projector": tr("Projector"),
    "draft": tr("Draft model"),
    "adapter": tr("LoRA adapter"),
    "imatrix": tr("Importance matrix"),
}


@dataclass(frozen=True, slots=True)
class RowWords:
    """A row of the list: `fit_colour` is a colour of the palette by its name."""

    title: str
    detail: str
    badges: tuple[str, ...]
    fit: str
    fit_colour: str
    speed: str
    is_favourite: bool

    @property
    def spoken(self) -> str:
        """The same in one line, for screen readers."""
        favourite = tr("favourite") if self.is_favourite else ""
        return ", ".join(
            part for part in (self.title, favourite, self.detail, *self.badges, self.fit, self.speed) if part
        )


def row_words(model: Listed) -> RowWords:
    """Return what the list says of `model`."""
    entry, chosen, facts = model.entry, model.chosen, model.entry.facts
    said = []
    if facts is not None:
        said += [facts.architecture, parameter_words(facts.n_parameters)]
    others = len(entry.quantisations) - 1
    said.append(f"{chosen.label} +{others}" if others else chosen.label)
    said += [format_bytes(chosen.size_bytes), *owner_words(model)]
    fit, colour = fit_of(model, chosen)
    return RowWords(
        entry.title,
        " · ".join(part for part in said if part),
        (*(CAPABILITY_WORDS[name] for name in entry.capabilities), *model.notes.tags),
        fit,
        colour,
        speed_of(model),
        model.notes.is_favourite,
    )


def owner_words(model: Listed) -> tuple[str, ...]:
    """Return whose stores a model lies in; folders by their names."""
    return tuple(owner.rstrip("/\\").replace("\\", "/").rpartition("/")[2] for owner in model.entry.owners)


def fit_of(model: Listed, quantisation: Quantisation) -> tuple[str, str]:
    """Return a few words on how a quantisation fits, and their colour."""
    if quantisation.fault:
        if quantisation.copy.is_missing:
            return tr("missing"), _BAD
        return (tr("incomplete") if quantisation.copy.missing else tr("cannot be read")), _BAD
    fit = model.fit_of(quantisation)
    return ("", _DIM) if fit is None else (fit_words(fit), _COLOURS[fit.kind])


def speed_of(model: Listed) -> str:
    """Return the measured speed, else the predicted one.

    A speed that was measured on other devices than the forecast uses is shown with those devices.
    """
    notes, fit = model.notes, model.fit
    if not notes.measured:
        return "" if fit is None else speed_words(fit)
    forecast_on = set() if fit is None else {device for device, _ in fit.layers}
    if not notes.measured_on or set(notes.measured_on.split(", ")) == forecast_on:
        return tr("{measured:.1f} tokens/s measured", measured=notes.measured)
    return tr("{measured:.1f} tokens/s measured on {devices}", measured=notes.measured, devices=notes.measured_on)


def parameter_words(n_parameters: int | None) -> str:
    """Return a number of parameters as people say it: 7.2 B."""
    if not n_parameters:
        return ""
    for size, letter in ((1_000_000_000_000, "T"), (1_000_000_000, "B"), (1_000_000, "M")):
        if n_parameters >= size:
            shown = n_parameters / size
            return f"{shown:.0f} {letter}" if shown >= 100 else f"{shown:.1f} {letter}"
    return str(n_parameters)


def fact_rows(model: Listed) -> tuple[tuple[str, str], ...]:
    """Return label and value of what a header tells."""
    facts = model.entry.facts
    if facts is None:
        return ()
    experts = (
        tr(
            "{n_experts}, {n_experts_used} used per token",
            n_experts=facts.n_experts,
            n_experts_used=facts.n_experts_used or "?",
        )
        if facts.n_experts
        else ""
    )
    rows = (
        (tr("Architecture"), facts.architecture),
        (tr("Parameters"), parameter_words(facts.n_parameters)),
        (tr("Layers"), str(facts.n_layers or "")),
        (tr("Experts"), experts),
        (
            tr("Trained context"),
            tr("{count} tokens", count=format_count(facts.n_ctx_train)) if facts.n_ctx_train else "",
        ),
        (tr("Name in the header"), facts.name if facts.name != model.entry.title else ""),
        (tr("Licence"), facts.license),
        (tr("Can"), ", ".join(CAPABILITY_WORDS[name] for name in model.entry.capabilities)),
    )
    return tuple(row for row in rows if row[1])


def fit_sentence(fit: Fit | None) -> str:
    """Return what is forecast of a quantisation, in full."""
    if fit is None:
        return tr("Not planned yet.")
    if not fit.fits:
        return f"{capitalised(fit_words(fit))}. {fit.reason}".strip()
    speed = speed_words(fit)
    parts = [
        place_words(fit),
        tr("context {n_ctx} tokens", n_ctx=format_count(fit.n_ctx)),
        speed,
        tr("strategy {strategy}", strategy=fit.strategy),
    ]
    return f"{capitalised(fit_words(fit))}: {', '.join(part for part in parts if part)}."


def place_lines(model: Listed, quantisation: Quantisation) -> tuple[str, ...]:
    """Return where a quantisation lies, each copy with its owner and number of parts."""
    lines = []
    for copy in quantisation.copies:
        owner = f"{copy.first.store.label}: " if copy.first.store.label else ""
        parts = tr(" and {count} more parts", count=len(copy.parts) - 1) if len(copy.parts) > 1 else ""
        lines.append(f"{owner}{copy.path}{parts}")
    return tuple(lines)


def side_lines(model: Listed) -> tuple[str, ...]:
    """Return what lies beside a model."""
    return tuple(
        f"{_SIDE_WORDS.get(side.role, side.role)}: {side.file.path.name} ({format_bytes(side.file.size_bytes)})"
        for side in model.entry.side_files
    )

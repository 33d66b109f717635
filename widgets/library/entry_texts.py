"""Texts about the models of the library, for the list of models and for the details of one model."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import Struct

from engine.base.language import tr
from engine.base.texts import capitalised
from engine.base.units import format_bytes, format_count
from engine.library.capabilities import CAPABILITY_TEXTS
from engine.library.entry import Quantisation
from engine.library.fit import fit_speed_text, fit_text, place_text, projector_text, sourced_speed_text
from engine.library.listed import Listed
from engine.library.notes import Notes
from engine.planning.speed.texts import predicted_rate_text, rate_text

_GOOD, _FAIR, _BAD, _DIM = "good", "experts", "bad", "dim"
_COLOURS = {"devices": _GOOD, "split": _FAIR, "cpu": _GOOD, "disk": _BAD, "no": _BAD, "unknown": _DIM}
# Words of a note that are shown on either side of a word that was searched for.
EXCERPT_WORDS = 2
_SIDE_WORDS = {
    "projector": tr("Projector"),
    "draft": tr("Draft model"),
    "adapter": tr("LoRA adapter"),
    "imatrix": tr("Importance matrix"),
}


class RowTexts(Struct, frozen=True):
    """The texts of a row of the list of models.

    `fit`: a text on whether the model fits this rig. `fit_colour`: palette name of the text's colour.
    `searched`: words of the search in lower case, which are highlighted.
    """

    title: str
    detail: str
    badges: tuple[str, ...]
    fit: str
    fit_colour: str
    speed: str
    is_favourite: bool
    searched: tuple[str, ...] = ()

    @property
    def spoken(self) -> str:
        """All texts of the row in one line, for screen readers."""
        favourite = tr("favourite") if self.is_favourite else ""
        return ", ".join(
            part for part in (self.title, favourite, self.detail, *self.badges, self.fit, self.speed) if part
        )


def row_texts(model: Listed, searched: Sequence[str] = ()) -> RowTexts:
    """Return the texts of the row of `model`.

    `searched`: words of the search in lower case. If a word is found only in a text that rows do not show, such as a
    file name, that text is added.
    """
    entry, chosen, facts = model.entry, model.chosen, model.entry.facts
    parts = []
    if facts is not None:
        parts += [facts.architecture, parameter_text(facts.n_parameters)]
    # A row has one quantisation, the one that would be opened; the number says that there are more.
    others = len(entry.quantisations) - 1
    parts.append(f"{chosen.label} +{others}" if others else chosen.label)
    parts += [format_bytes(chosen.size_bytes), *owner_words(model)]
    fit, colour = fit_of(model, chosen)
    badges = (*(CAPABILITY_TEXTS[name] for name in entry.capabilities), *model.notes.tags)
    # `casefold`, as in the search itself, so that "STRASSE" finds "Straße".
    visible = " ".join((entry.title, *parts, *badges)).casefold()
    # First, because the end of the line may be cut off.
    parts = [*_hidden_hits(model, [word for word in searched if word not in visible]), *parts]
    return RowTexts(
        entry.title,
        " · ".join(part for part in parts if part),
        badges,
        fit,
        colour,
        speed_of(model),
        model.notes.is_favourite,
        tuple(searched),
    )


def _hidden_hits(model: Listed, searched: Sequence[str]) -> list[str]:
    """Return for each searched word a text of `model` that contains it, such as a file name or an excerpt of the notes.

    `searched`: words in lower case that do not occur in the row of the model. Words without such a text are left out.
    """
    entry, facts = model.entry, model.entry.facts
    copies = [copy.first for each in entry.quantisations for copy in each.copies]
    texts = [
        *(each.label for each in entry.quantisations),
        *(file.path.name for file in copies),
        *(file.name for file in copies),
        *(file.title for file in copies),
        *(str(file.store.words) for file in copies),
        facts.name if facts is not None else "",
    ]
    # A dict instead of a set keeps the order of the searched words.
    hits: dict[str, None] = {}
    for word in searched:
        found = next((text for text in texts if word in text.casefold()), None)
        if found is None and word in model.notes.text.casefold():
            found = tr("notes: {excerpt}", excerpt=_excerpt(model.notes.text, word))
        if found is not None:
            hits[found] = None
    return list(hits)


def _excerpt(text: str, word: str) -> str:
    """Return the words of `text` around the first occurrence of `word` (in lower case), in one line."""
    words = text.split()
    at = next((index for index, each in enumerate(words) if word in each.casefold()), 0)
    begin, end = max(0, at - EXCERPT_WORDS), at + EXCERPT_WORDS + 1
    return f"{'…' if begin else ''}{' '.join(words[begin:end])}{'…' if end < len(words) else ''}"


def owner_words(model: Listed) -> tuple[str, ...]:
    """Return short names of the programs or folders that have copies of a model. A path is cut to its last part."""
    # Not `Path.name`: an owner may be a name of the hub, or a folder in the spelling of Windows.
    return tuple(owner.rstrip("/\\").replace("\\", "/").rpartition("/")[2] for owner in model.entry.owners)


def fit_of(model: Listed, quantisation: Quantisation) -> tuple[str, str]:
    """Return a short text on whether a quantisation fits this rig, and the palette name of the text's colour."""
    if quantisation.fault:
        if quantisation.copy.is_missing:
            return tr("missing"), _BAD
        return (tr("incomplete") if quantisation.copy.missing else tr("cannot be read")), _BAD
    fit = model.fit_of(quantisation)
    return ("", _DIM) if fit is None else (fit_text(fit), _COLOURS[fit.kind])


def speed_of(model: Listed) -> str:
    """Return the speed of a model as text: measured in an answer with the forecast's layout, or else predicted."""
    # Only one on the layout of the forecast counts (`measured_of`): another layout can be several times as fast.
    measured = model.measured_of(model.chosen)
    if measured:
        return tr("{rate} tokens/s measured", rate=rate_text(measured))
    return "" if model.fit is None else fit_speed_text(model.fit)


def short_speed(model: Listed, quantisation: Quantisation) -> str:
    """Return the tokens per second of a quantisation as a short text: measured in an answer, or else predicted."""
    measured, fit = model.measured_of(quantisation), model.fit_of(quantisation)
    if quantisation.fault:
        return ""
    if measured:
        return tr("{rate} measured", rate=rate_text(measured))
    if fit is None or not fit.fits or not fit.speed:
        return ""
    rate = predicted_rate_text(fit.speed)
    return tr("about {rate}", rate=rate) if fit.is_speed_known else tr("roughly {rate}", rate=rate)


def answer_sentence(notes: Notes) -> str:
    """Return a sentence on the speed and the devices of the last answer; empty if there is no answer.

    It is used if the layout of the last answer differs from that of the forecast.
    """
    if not notes.measured:
        return ""
    rate = rate_text(notes.measured)
    if not notes.measured_on:
        return tr("The last answer had {rate} tokens/s, with another layout.", rate=rate)
    devices = notes.measured_on
    return tr("The last answer had {rate} tokens/s, with another layout ({devices}).", rate=rate, devices=devices)


def parameter_text(n_parameters: int | None) -> str:
    """Return a number of parameters in the usual form, such as "7.2 B"."""
    if not n_parameters:
        return ""
    for size, letter in ((1_000_000_000_000, "T"), (1_000_000_000, "B"), (1_000_000, "M")):
        # Short scale, as in names of models: 7.2 B is 7.2 * 10^9.
        if n_parameters >= size:
            shown = n_parameters / size
            return f"{shown:.0f} {letter}" if shown >= 100 else f"{shown:.1f} {letter}"
    return str(n_parameters)


def fact_rows(model: Listed) -> tuple[tuple[str, str], ...]:
    """Return the values from the header of the model file, such as its architecture, as (label, value)."""
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
        (tr("Parameters"), parameter_text(facts.n_parameters)),
        (tr("Layers"), str(facts.n_layers or "")),
        (tr("Experts"), experts),
        (tr("MTP heads"), str(facts.n_mtp_heads or "")),
        (
            tr("Trained context"),
            tr("{count} tokens", count=format_count(facts.n_ctx_train)) if facts.n_ctx_train else "",
        ),
        (tr("Name in the file"), model.entry.header_name),
        (tr("Licence"), facts.license),
        (tr("Capabilities"), ", ".join(CAPABILITY_TEXTS[name] for name in model.entry.capabilities)),
    )
    return tuple(row for row in rows if row[1])


def fit_sentence(model: Listed, quantisation: Quantisation) -> str:
    """Return sentences with the forecast of a quantisation (fit, devices, context) and its speed."""
    fit, measured = model.fit_of(quantisation), model.measured_of(quantisation)
    answer = "" if measured else answer_sentence(model.notes_of(quantisation))
    if fit is None:
        return answer
    if not fit.fits:
        counted = tr("The forecast includes the memory of the projector.") if fit.projector else ""
        return " ".join(part for part in (f"{capitalised(fit_text(fit))}.", fit.reason, counted, answer) if part)
    speed = sourced_speed_text(fit)
    if measured:
        speed = tr(
            "{rate} tokens/s measured (predicted {predicted})",
            rate=rate_text(measured),
            predicted=predicted_rate_text(fit.speed),
        )
    parts = [
        place_text(fit),
        projector_text(fit),
        tr("context {n_ctx} tokens", n_ctx=format_count(fit.n_ctx)),
        speed,
        tr("strategy {strategy}", strategy=fit.strategy),
    ]
    sentence = f"{capitalised(fit_text(fit))}: {', '.join(part for part in parts if part)}."
    return f"{sentence} {answer}".strip()


def place_lines(model: Listed, quantisation: Quantisation) -> tuple[str, ...]:
    """Return one line for each copy of a quantisation: owner, path, and for a split file the number of other parts."""
    lines = []
    for copy in quantisation.copies:
        owner = f"{copy.first.store.label}: " if copy.first.store.label else ""
        parts = tr(" and {count} more parts", count=len(copy.parts) - 1) if len(copy.parts) > 1 else ""
        lines.append(f"{owner}{copy.path}{parts}")
    return tuple(lines)


def side_lines(model: Listed) -> tuple[str, ...]:
    """Return one line for each related file, such as a projector: role, name and size."""
    return tuple(
        f"{_SIDE_WORDS.get(side.role, side.role)}: {side.file.path.name} ({format_bytes(side.file.size_bytes)})"
        for side in model.entry.side_files
    )

"""Texts of the questions to ask before a load that does not fit beside the loaded models, or does not fit at all."""

from __future__ import annotations

from collections.abc import Sequence

from engine.base.language import join_names, tr, tr_count
from engine.base.units import format_bytes
from engine.base.values import replace
from engine.planning.fit.loaded_models import HeldModel
from engine.planning.fit.proposal import Proposal
from engine.planning.fit.unload_plan import UnloadPlan
from widgets.library.load_question import LoadQuestion

MAX_NAME_LENGTH = 32
"""Largest length of a model's name in a question, in characters; tool tips show the whole name."""


def load_question(unloads: UnloadPlan, name: str, now_s: float) -> LoadQuestion:
    """Return the question whether to unload other models before the model `name` is loaded.

    `unloads`: the models to unload for the load, and the memory that is missing before and after their unload.
    `now_s`: the present time in seconds, from `OpenModels.now_s`.
    """
    full_name, name = name, _short_name(name)
    victims = join_names([f"{_short_name(victim.name)} ({idle_text(victim, now_s)})" for victim in unloads.victims])
    names = join_names([victim.name for victim in unloads.victims])
    whom = _short_name(names) if len(unloads.victims) == 1 else tr("{count} models", count=len(unloads.victims))
    if unloads.workers:
        text = tr_count(
            "{name} needs {workers}, which {other_models} is using. A worker serves one model at a time.",
            "{name} needs {workers}, which {other_models} are using. A worker serves one model at a time.",
            len(unloads.victims),
            name=name,
            workers=join_names(unloads.workers),
            other_models=victims,
        )
    elif unloads.still_short:
        text = tr(
            "{name} does not fit, even without {other_models}: it would need {short}.",
            name=name,
            other_models=victims,
            short=_short_text(unloads.still_short),
        )
    else:
        text = tr(
            "{name} does not fit together with {other_models}: it needs {short}.",
            name=name,
            other_models=victims,
            short=_short_text(unloads.short),
        )
    if unloads.workers and unloads.still_short:
        text += tr(" Even after the unload it would need {short}.", short=_short_text(unloads.still_short))
    busy = [_short_name(victim.name) for victim in unloads.victims if victim.is_busy]
    if busy:
        text += tr(" The answer that {names} is writing would be stopped.", names=join_names(busy))
    return LoadQuestion(
        text=text,
        unload_text=tr("Unload {models} and load", models=whom),
        unload_tool_tip=tr("Unload {names} and load {full_name}", names=names, full_name=full_name),
        without_unload_text="" if unloads.workers else tr("Load anyway"),
        # An answer that is being written is never ended unasked.
        can_remember=not busy,
    )


def fit_question(unloads: UnloadPlan, name: str, *, is_loaded: bool) -> LoadQuestion:
    """Return the question whether to load the model `name` with a layout that will not fit according to the forecast.

    `unloads`: the missing memory. It has no models to unload.
    `is_loaded`: whether the model is loaded with another layout, which stays loaded until the answer.
    """
    text = tr(
        "{name} will probably not fit: it needs {short}.", name=_short_name(name), short=_short_text(unloads.short)
    )
    if is_loaded:
        text += tr(" The layout that is loaded now stays loaded until you decide.")
    return LoadQuestion(
        text=text, unload_text="", unload_tool_tip="", without_unload_text=tr("Load anyway"), can_remember=False
    )


def override_question(message: str, proposal: Proposal) -> LoadQuestion:
    """Return the question whether to drop overrides that the split mode does not support.

    `message`: sentence with the rule of llama.cpp that the overrides break.
    `proposal`: layout and settings without these overrides.
    """
    return LoadQuestion(
        text=tr("{message} The model can be loaded without these overrides.", message=message),
        unload_text="",
        unload_tool_tip="",
        without_unload_text="",
        can_remember=False,
        proposal_text=tr("Remove overrides and load"),
        proposal_tool_tip=proposal.text,
    )


def with_proposal(question: LoadQuestion, proposal: Proposal | None) -> LoadQuestion:
    """Return `question` with a sentence and a button for `proposal`, a layout or setting that would fit.

    `proposal`: None if the search found nothing; the sentence then says so.
    """
    if proposal is None:
        return replace(question, text=tr("{text} No other layout or setting was found that fits.", text=question.text))
    text = tr(
        "{text} This would fit: {proposal} ({words}).", text=question.text, proposal=proposal.text, words=proposal.words
    )
    return replace(question, text=text, proposal_text=tr("Apply and load"), proposal_tool_tip=proposal.text)


def idle_text(model: HeldModel, now_s: float) -> str:
    """Return "answering" or how long the model has been idle, in whole minutes or hours, as a text for people.

    `now_s`: the present time in seconds, from `OpenModels.now_s`.
    """
    if model.idle_since_s is None:
        return tr("answering")
    minutes = int((now_s - model.idle_since_s) // 60)
    if minutes < 1:
        return tr("idle")
    return (
        tr("idle for {minutes} min", minutes=minutes) if minutes < 60 else tr("idle for {hours} h", hours=minutes // 60)
    )


def _short_name(name: str) -> str:
    """Return `name`, shortened in the middle if it is longer than `MAX_NAME_LENGTH`."""
    if len(name) <= MAX_NAME_LENGTH:
        return name
    # The end stays: it often names the quantisation.
    return f"{name[: MAX_NAME_LENGTH - 9]}…{name[-8:]}"


def _short_text(short: Sequence[tuple[str, int]]) -> str:
    return join_names(
        [
            tr("{missing} more on {device}", missing=format_bytes(missing_bytes), device=device)
            for device, missing_bytes in short
        ]
    )

"""Whether a model fits beside those that are loaded, and the question to ask if one of them has to be unloaded."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from engine.base.language import tr, tr_count
from engine.base.units import format_bytes
from engine.devices.device import Rig
from engine.planning.fit.loaded_models import HeldModel, choose_victims, rows_fit
from engine.planning.fit.proposal import Proposal
from engine.planning.plan.report import DeviceRow
from widgets.library.load_question import LoadQuestion

_Leaving = Sequence[HeldModel]
MAX_NAME_LENGTH = 32
"""Characters of a model's name in a question; tool tips have all of it."""


@dataclass(frozen=True, slots=True)
class Room:
    """What a load asks of the models that are loaded.

    `victims`: models to unload first; none if the load can begin.
    `short`: bytes missing by device while they stay, as (device, bytes).
    `still_short`: the same once they are unloaded.
    `workers`: RPC workers of the layout that one of them uses.
    """

    victims: tuple[HeldModel, ...] = ()
    short: tuple[tuple[str, int], ...] = ()
    still_short: tuple[tuple[str, int], ...] = ()
    workers: tuple[str, ...] = ()


def find_room(rows: Sequence[DeviceRow], others: Sequence[HeldModel], rig_without: Callable[[_Leaving], Rig]) -> Room:
    """Return what a load with the needs of `rows` asks of the `others`, the models that it does not replace.

    `rig_without` tells the devices when some of them have gone. Where not even all of them are enough, those that hold
    something on the short devices are named: the forecast refuses no load.
    """
    beside = rig_without(())
    if rows_fit(rows, beside):
        return Room()
    victims = choose_victims(others, lambda leaving: rows_fit(rows, rig_without(leaving)))
    short = _short(rows, beside)
    if victims is None:
        ids = {device for device, _ in short}
        endpoints = {device.endpoint for device in beside.devices if device.id in ids}
        victims = tuple(model for model in others if ids & model.held_bytes.keys() or endpoints & model.endpoints)
    still_short = _short(rows, rig_without(victims))
    used = {row.id for row in rows if row.need_bytes}
    workers = tuple(each.id for each in beside.devices if each.is_rpc and each.holdings and each.id in used)
    return Room(victims, short, still_short, workers)


def load_question(room: Room, name: str, now_s: float) -> LoadQuestion:
    """Return what to ask before `name` is loaded."""
    full_name, name = name, _short_name(name)
    victims = _join([f"{_short_name(victim.name)} ({idle_text(victim, now_s)})" for victim in room.victims])
    names = _join([victim.name for victim in room.victims])
    whom = _short_name(names) if len(room.victims) == 1 else tr("{count} models", count=len(room.victims))
    if room.workers:
        text = tr_count(
            "{name} needs {workers}, which works for {victims}. A worker serves one model at a time.",
            "{name} needs {workers}, which work for {victims}. A worker serves one model at a time.",
            len(room.workers),
            name=name,
            workers=_join(room.workers),
            victims=victims,
        )
    elif room.still_short:
        text = tr(
            "{name} does not fit, even without {victims}: {short} would be missing.",
            name=name,
            victims=victims,
            short=_short_text(room.still_short),
        )
    else:
        text = tr(
            "{name} does not fit beside {victims}: {short} missing.",
            name=name,
            victims=victims,
            short=_short_text(room.short),
        )
    busy = [_short_name(victim.name) for victim in room.victims if victim.is_busy]
    if busy:
        text += tr(" The answer that {names} writes would end.", names=_join(busy))
    return LoadQuestion(
        text=text,
        unload_text=tr("Unload {whom} and load", whom=whom),
        unload_tool_tip=tr("Unload {names} and load {full_name}", names=names, full_name=full_name),
        beside_text="" if room.workers else tr("Load anyway"),
        can_remember=not busy,
    )


def fit_question(room: Room, name: str) -> LoadQuestion:
    """Return what to ask before what is loaded of a model goes for a layout that is forecast not to fit."""
    return LoadQuestion(
        text=tr(
            "{short_name} is forecast not to fit like this: {short} missing. What is loaded stays until you choose.",
            short_name=_short_name(name),
            short=_short_text(room.short),
        ),
        unload_text="",
        unload_tool_tip="",
        beside_text=tr("Load anyway"),
        can_remember=False,
    )


def with_proposal(question: LoadQuestion, proposal: Proposal | None) -> LoadQuestion:
    """Return `question` with what would fit instead; None: nothing was found."""
    if proposal is None:
        return replace(question, text=tr("{text} No other layout or setting was found that fits.", text=question.text))
    text = tr(
        "{text} This would fit: {text2} ({words}).", text=question.text, text2=proposal.text, words=proposal.words
    )
    return replace(question, text=text, proposal_text=tr("Change that and load"), proposal_tool_tip=proposal.text)


def idle_text(model: HeldModel, now_s: float) -> str:
    """Return "answering", or for how long it has been idle, in whole minutes or hours."""
    if model.idle_since_s is None:
        return tr("answering")
    minutes = int((now_s - model.idle_since_s) // 60)
    if minutes < 1:
        return tr("idle")
    return (
        tr("idle for {minutes} min", minutes=minutes)
        if minutes < 60
        else tr("idle for {minutes} h", minutes=minutes // 60)
    )


def _short_name(name: str) -> str:
    """Return `name` without its middle where it is too long for a sentence."""
    if len(name) <= MAX_NAME_LENGTH:
        return name
    return f"{name[: MAX_NAME_LENGTH - 9]}…{name[-8:]}"


def _short(rows: Sequence[DeviceRow], rig: Rig) -> tuple[tuple[str, int], ...]:
    devices = {device.id: device for device in rig.all_devices}
    short = [
        (row.id, row.need_bytes + devices[row.id].margin_bytes - devices[row.id].available_bytes)
        for row in rows
        if row.need_bytes and row.id in devices
    ]
    return tuple((device, missing_bytes) for device, missing_bytes in short if missing_bytes > 0)


def _short_text(short: Sequence[tuple[str, int]]) -> str:
    return _join(
        [
            tr("{missing} on {device}", missing=format_bytes(missing_bytes), device=device)
            for device, missing_bytes in short
        ]
    )


def _join(words: Sequence[str]) -> str:
    return tr(" and ").join(filter(None, (", ".join(words[:-1]), *words[-1:])))

"""From the child's messages, greetings and outcomes to the events that people get to see."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from engine.base.language import tr
from engine.base.texts import show
from engine.base.units import format_bytes
from engine.devices.device import Device, Rig, names_of
from engine.devices.endpoint import Greeting, GreetingStatus
from engine.planning.memory.estimate import Grade
from engine.planning.plan.plan import Plan
from engine.runtime.probing.measured import member_estimate, rows_from_parts, with_copies
from engine.runtime.process.outcome import EndReason, ProcessOutcome, last_words
from engine.runtime.protocol.messages import AllocationFailure, Failure, Generated, LoadedModel, Part
from engine.runtime.session.events import STAGE_WORDS, Crashed, Done, Failed, Loaded, OutOfMemory, Stage

_GENERATING = tr("while generating")


def loaded_event(plan: Plan, message: LoadedModel) -> Loaded:
    """Return the measured rows beside the plan's forecast; nothing beside them where that left something out."""
    measured = rows_from_parts(message.parts, plan.rig, Grade.MEASURED, member_estimate(plan, message.parts))
    measured = with_copies(measured, plan.rig, plan.resolved.model_estimate.devices)
    return Loaded(devices=measured, forecast=plan.forecast if plan.report.probe_only is None else ())


def out_of_memory_event(rig: Rig, message: AllocationFailure, *, generating: bool = False) -> OutOfMemory:
    """Return the failed allocation with what was placed before it."""
    placed = _placed_bytes(message.parts)
    free_bytes = _free_bytes(rig.device(message.device), message.free_bytes, placed.get(message.device, 0))
    where = _GENERATING if generating else tr("while {stage_words}", stage_words=STAGE_WORDS[message.stage])
    free = "" if free_bytes is None else tr(", {free} free", free=format_bytes(free_bytes))
    before = ", ".join(f"{device} {format_bytes(size_bytes)}" for device, size_bytes in placed.items() if size_bytes)
    return OutOfMemory(
        stage=message.stage,
        device=message.device,
        requested_bytes=message.requested_bytes,
        free_bytes=free_bytes,
        allocated=rows_from_parts(message.parts, rig, Grade.MEASURED),
        message=(
            tr(
                "{device} ran out of memory {where}: {requested} asked for{free}. {what} Move layers off "
                "{device}, shorten the context or choose a smaller KV type.",
                device=message.device,
                where=where,
                requested=format_bytes(message.requested_bytes),
                free=free,
                what=tr("Already placed: {before}.", before=before) if before else tr("Nothing had been placed yet."),
            )
        ),
    )


def failed_event(message: Failure) -> Failed:
    """Return the child's own ending."""
    return Failed(kind=message.kind, message=last_words(message))


def done_event(message: Generated) -> Done:
    """Return the end of a generation; the prompt's speed counts what was decoded, not what was still cached."""
    return Done(
        prompt_tokens=message.prompt_tokens,
        generated_tokens=message.generated_tokens,
        prompt_tokens_per_second=_speed(message.evaluated_tokens, message.prompt_seconds),
        generation_tokens_per_second=_speed(message.generated_tokens, message.generation_seconds),
        stop_reason=message.stop_reason,
        replaced=show(message.replaced),
        replaced_for_log=show(message.replaced_for_log),
        cached_tokens=message.cached_tokens,
        checkpoint_bytes=message.checkpoint_bytes,
    )


def refusal(greetings: Mapping[str, Greeting], devices: Mapping[str, Sequence[Device]]) -> Failed | None:
    """Return why a load cannot begin, None if every endpoint answered as it should."""
    bad = [greeting for greeting in greetings.values() if not greeting.ok]
    if not bad:
        return None
    only_busy = all(greeting.status is GreetingStatus.BUSY for greeting in bad)
    sentences = " ".join(f"{names_of(devices[greeting.endpoint])}: {greeting.sentence}" for greeting in bad)
    return Failed(kind="busy" if only_busy else "unreachable", message=sentences)


def crash_event(
    outcome: ProcessOutcome, known: str = "", devices: Mapping[str, Sequence[Device]] | None = None
) -> Failed | Crashed:
    """Return the ending for a child that went without its last word, where no device is to blame for certain.

    `known`: sentences on what is known of the engine with what the child did. `devices`: those that it used by
    endpoint; a server that greets well may answer the engine with silence, or with what it does not survive.
    """
    peers = ""
    if devices:
        names = ", ".join(f"{names_of(held)} ({endpoint})" for endpoint, held in devices.items())
        peers = tr("It used {names}, which may not answer as an RPC worker should: check what runs there.", names=names)
    if outcome.reason is EndReason.STALLED:
        return Failed(kind="stalled", message=" ".join(filter(None, (outcome.sentence, peers))))
    if outcome.reason is EndReason.STOPPED:
        return Failed(kind="stalled", message=outcome.sentence)
    if outcome.reason is not EndReason.ITSELF:
        return Failed(kind="internal", message=outcome.sentence)
    if outcome.lost_device:
        return Failed(kind="unreachable", message=outcome.sentence)
    message = outcome.sentence
    if (known or peers) and outcome.is_fault_of_engine:
        # Its last words end as they are.
        message = " ".join(filter(None, (f"{message.rstrip('.')}.", known, peers)))
    return Crashed(kind="crashed", signal=outcome.signal, exit_code=outcome.exit_code, message=message)


def lost_event(
    outcome: ProcessOutcome,
    stage: Stage | None,
    devices: Mapping[str, Sequence[Device]],
    greetings: Mapping[str, Greeting],
    known: str = "",
) -> Failed | Crashed:
    """Return the ending for a child that went down, or stood still, over RPC; greetings tell which server it was.

    `stage` None means that it was generating or idle.
    """
    to_blame = _endpoints_to_blame(outcome, devices, greetings)
    if not to_blame:
        return crash_event(outcome, known, devices)
    names = " or ".join(f"{names_of(devices[endpoint])} ({endpoint})" for endpoint in to_blame)
    when = (
        tr("while the model was in use") if stage is None else tr("while {stage_words}", stage_words=STAGE_WORDS[stage])
    )
    told = " ".join(greetings[endpoint].sentence for endpoint in to_blame if endpoint in greetings)
    what = tr("did not go on") if outcome.reason is EndReason.STALLED else tr("was lost")
    remedy = tr("Check that RPC worker, start it again, then load again.")
    return Failed(kind="unreachable", message=" ".join(filter(None, (f"{names} {what} {when}.", told, remedy))))


def _endpoints_to_blame(
    outcome: ProcessOutcome, devices: Mapping[str, Sequence[Device]], greetings: Mapping[str, Greeting]
) -> list[str]:
    named = outcome.lost_endpoint
    # A tunnel is dialled where it begins, and that is what the engine names.
    if named is not None and (known := [each for each, held in devices.items() if named in (each, held[0].via)]):
        return known
    gone = [endpoint for endpoint, greeting in greetings.items() if not greeting.ok]
    certain = [endpoint for endpoint in gone if greetings[endpoint].status is not GreetingStatus.BUSY]
    if certain or gone:
        return certain or gone
    # All answer by now: the lost one was started again, or the child was dropped. One of them it was.
    return list(devices) if outcome.lost_rpc else []


def _placed_bytes(parts: Sequence[Part]) -> dict[str, int]:
    placed: dict[str, int] = {}
    for part in parts:
        weights_bytes = 0 if part.mapped else part.weights_bytes
        size_bytes = weights_bytes + part.kv_cache_bytes + part.recurrent_bytes + part.compute_bytes + part.output_bytes
        placed[part.device] = placed.get(part.device, 0) + size_bytes
    return placed


def _free_bytes(device: Device | None, reported_bytes: int | None, placed_bytes: int) -> int | None:
    """Return what was free. A server reports its machine's memory: the rig's limit less our part may be smaller."""
    if device is None or (device.cap_bytes is None and device.free_bytes is None):
        return reported_bytes
    left_bytes = max(0, device.available_bytes - placed_bytes)
    return left_bytes if reported_bytes is None else min(left_bytes, reported_bytes)


def _speed(tokens: int, seconds: float) -> float:
    return tokens / seconds if seconds > 0 else 0.0

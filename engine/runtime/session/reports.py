"""Functions that build the events of a session.

They get messages of the child, results of the check whether RPC workers answer (greetings), and process outcomes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from engine.base.language import tr
from engine.base.texts import show
from engine.base.units import format_bytes
from engine.devices.device import Device, Rig, is_on_this_machine, names_of
from engine.devices.endpoint import Greeting, GreetingStatus
from engine.planning.memory.estimate import Grade
from engine.planning.plan.placement_check import placement_differences
from engine.planning.plan.plan import Plan
from engine.planning.plan.report import DeviceRow
from engine.runtime.probing.device_rows import member_estimate, rows_from_buffers, with_copies
from engine.runtime.process.outcome import EndReason, ProcessOutcome, failure_text
from engine.runtime.protocol.messages import AllocationFailure, BufferMemory, Failure, Generated, LoadedModel
from engine.runtime.session.events import (
    STAGE_TEXTS,
    AnswerStage,
    Crashed,
    Done,
    Failed,
    Loaded,
    OutOfMemory,
    Sent,
    Stage,
    stage_words,
)
from engine.runtime.session.state import LoadProgress

_GENERATING = tr("while generating")


def loaded_event(plan: Plan, message: LoadedModel) -> Loaded:
    """Return the event `Loaded` with the measured memory, and with the forecast if Layerdeck could compute one.

    The event has no forecast if the memory of the model is only known from a probe (a load without memory).
    """
    measured = rows_from_buffers(message.parts, plan.rig, Grade.MEASURED, member_estimate(plan, message.parts))
    measured = with_copies(measured, plan.rig, plan.resolved.model_estimate.devices)
    elsewhere = placement_differences(
        plan.edit.layout, message.layer_devices, message.kv_devices, offload_kqv=plan.settings.offload_kqv
    )
    forecast = plan.forecast if plan.report.probe_only is None else ()
    return Loaded(devices=measured, forecast=forecast, elsewhere=elsewhere, sent=_sent(message, measured))


def _sent(message: LoadedModel, measured: Sequence[DeviceRow]) -> tuple[Sent, ...]:
    weights = {row.id: row.weights_bytes for row in measured}
    found = []
    for each in message.sent:
        weights_bytes = sum(weights.get(device, 0) for device in each.devices)
        if weights_bytes:
            kept_bytes = max(0, weights_bytes - each.sent_bytes)
            found.append(
                Sent(
                    devices=each.devices,
                    weights_bytes=weights_bytes,
                    sent_bytes=each.sent_bytes,
                    kept_bytes=kept_bytes,
                    seconds=round(each.seconds, 1),
                )
            )
    return tuple(found)


def out_of_memory_event(rig: Rig, message: AllocationFailure, *, answering: AnswerStage | None = None) -> OutOfMemory:
    """Return the event `OutOfMemory` for a refused allocation, with the memory that was allocated before it.

    `answering`: stage of the answer; None for a load.
    """
    placed = _placed_bytes(message.parts)
    free_bytes = _free_bytes(rig.device(message.device), message.free_bytes, placed.get(message.device, 0))
    where = _GENERATING if answering else tr("while {stage_words}", stage_words=STAGE_TEXTS[message.stage])
    if message.draft:
        where = tr("{when}, for the draft model", when=where)
    free = "" if free_bytes is None else tr(", {free} free", free=format_bytes(free_bytes))
    before = ", ".join(f"{device} {format_bytes(size_bytes)}" for device, size_bytes in placed.items() if size_bytes)
    what = tr("Already allocated: {sizes}.", sizes=before) if before else tr("This was the first allocation.")
    requested = format_bytes(message.requested_bytes)
    if message.draft:
        sentences = tr(
            "{device} ran out of memory {when}: {requested} requested{free}. {allocated} Move the draft model to "
            "another device, move layers off {device}, or load without the draft.",
            device=message.device,
            when=where,
            requested=requested,
            free=free,
            allocated=what,
        )
    else:
        sentences = tr(
            "{device} ran out of memory {when}: {requested} requested{free}. {allocated} Move layers off {device}, "
            "shorten the context or choose a smaller KV cache type.",
            device=message.device,
            when=where,
            requested=requested,
            free=free,
            allocated=what,
        )
    return OutOfMemory(
        stage=answering or message.stage,
        device=message.device,
        requested_bytes=message.requested_bytes,
        free_bytes=free_bytes,
        allocated=rows_from_buffers(message.parts, rig, Grade.MEASURED),
        message=sentences,
    )


def failed_event(message: Failure) -> Failed:
    """Return the event `Failed` for a failure that the child reported."""
    return Failed(kind=message.kind, message=failure_text(message))


def done_event(message: Generated) -> Done:
    """Return the event `Done` for the end of a generation. Prompt speed counts computed tokens, not cached ones."""
    return Done(
        prompt_tokens=message.prompt_tokens,
        generated_tokens=message.generated_tokens,
        prompt_tokens_per_second=_speed(message.evaluated_tokens, message.prompt_seconds),
        generation_tokens_per_second=_speed(message.generated_tokens, message.generation_seconds),
        stop_reason=message.stop_reason,
        stop_text=message.stop_text,
        replaced=show(message.replaced),
        replaced_for_log=show(message.replaced_for_log),
        cached_tokens=message.cached_tokens,
        checkpoint_bytes=message.checkpoint_bytes,
        dropped_tokens=message.dropped_tokens,
        draft=message.draft,
    )


def refusal(greetings: Mapping[str, Greeting], devices: Mapping[str, Sequence[Device]]) -> Failed | None:
    """Return the event `Failed` for a load if an RPC worker did not answer correctly; None if all workers did.

    `greetings`: result of the check of each worker, by endpoint.
    `devices`: devices of the rig by endpoint.
    """
    bad = [greeting for greeting in greetings.values() if not greeting.ok]
    if not bad:
        return None
    # "busy" has its own kind: another client will give the worker back, so that a later load may succeed.
    only_busy = all(greeting.status is GreetingStatus.BUSY for greeting in bad)
    sentences = " ".join(f"{names_of(devices[greeting.endpoint])}: {greeting.sentence}" for greeting in bad)
    return Failed(kind="busy" if only_busy else "unreachable", message=sentences)


def crash_event(
    outcome: ProcessOutcome,
    known: str = "",
    devices: Mapping[str, Sequence[Device]] | None = None,
    *,
    model: str = "",
) -> Failed | Crashed:
    """Return the final event for a child that ended without an answer, if no RPC worker is known to be the cause.

    `known`: sentences about known faults of llama.cpp with this plan; empty if there are none.
    `devices`: devices that the child used over RPC, by endpoint. The message names them, because a server that passed
    our check may still crash the child with a wrong answer.
    `model`: name of the model's file. The message names it if the file may be the cause of a crash.
    """
    peers = ""
    if devices:
        names = ", ".join(f"{names_of(held)} ({endpoint})" for endpoint, held in devices.items())
        peers = tr("The engine process used {names}. Check that an RPC worker runs there.", names=names)
    if outcome.reason is EndReason.STALLED:
        return Failed(kind="stalled", message=" ".join(filter(None, (outcome.sentence, peers))))
    if outcome.reason is EndReason.STOPPED:
        return Failed(kind="stalled", message=outcome.sentence)
    if outcome.reason is not EndReason.ITSELF:
        return Failed(kind="internal", message=outcome.sentence)
    if outcome.lost_device:
        return Failed(kind="unreachable", message=outcome.sentence)
    message = outcome.sentence
    if not outcome.is_fault_of_engine:
        known = peers = ""
    is_named = not model or model in message or not outcome.may_be_of_model
    named = "" if is_named else tr("The engine process was running {model}.", model=model)
    if known or peers or named:
        # The sentence may end with a quotation from standard error, with or without a full stop.
        message = " ".join(filter(None, (f"{message.rstrip('.')}.", named, known, peers)))
    return Crashed(kind="crashed", signal=outcome.signal, exit_code=outcome.exit_code, message=message)


def progress_text(progress: LoadProgress) -> str:
    """Return sentences for the user: which stage a stalled load had reached, and what to do if it was only slow."""
    fraction = progress.fraction
    reached = (
        tr("The load had reached this stage: {stage_words}.", stage_words=STAGE_TEXTS[progress.stage])
        if fraction is None
        else tr(
            "The load had reached this stage: {stage_words} ({percent} % done).",
            stage_words=STAGE_TEXTS[progress.stage],
            percent=int(fraction * 100),
        )
    )
    return (
        f"{reached} {tr('If the load is only slow, raise “Stall limit” in the preferences (or with --stall-limit).')}"
    )


def memory_event(
    outcome: ProcessOutcome, plan: Plan, stage: Stage | AnswerStage, allocated: tuple[DeviceRow, ...]
) -> OutOfMemory | None:
    """Return the event `OutOfMemory` if the engine's child process ended because it ran out of device memory.

    None if the child ended for another reason. ggml ends the child if an allocation fails during a computation. The
    computation may need memory that the forecast does not contain: pools, cuBLAS workspaces and converted weights. They
    are allocated during the warm-up and the first long prompt.

    `outcome`: how the child ended.
    `plan`: plan of the child's model.
    `stage`: stage of the load or of the answer in which the child ended.
    `allocated`: memory to report as allocated before the failure, one row for each device.
    """
    if not outcome.ran_out_of_memory:
        return None
    device = outcome.refusing_device or _refusing_card(outcome, plan)
    when = stage_words(stage)
    if outcome.free_bytes is not None:
        when = tr("{when} with {free} free", when=when, free=format_bytes(outcome.free_bytes))
    return OutOfMemory(
        stage=stage,
        device=device,
        requested_bytes=outcome.requested_bytes,
        free_bytes=outcome.free_bytes,
        allocated=allocated,
        message=tr(
            "{device} ran out of memory {when}: a computation needed more memory than the allocated buffers. Move "
            "layers off {device}, shorten the context, lower the micro batch or turn flash attention on.",
            device=device,
            when=when,
        ),
    )


def _refusing_card(outcome: ProcessOutcome, plan: Plan) -> str:
    # The child sees only the cards of its plan, in the order of the rig (`engine.runtime.plan_requests.environment`).
    cards = [device for device in plan.devices_in_use if device.backend in ("CUDA", "HIP") and not device.is_rpc]
    number = outcome.cuda_device
    return cards[number].id if number is not None and number < len(cards) else names_of(cards) or "CUDA"


def _when(stage: Stage | None, *, is_answering: bool) -> str:
    if stage is not None:
        return stage_words(stage)
    return stage_words("answer") if is_answering else tr("while the model was in use")


def lost_event(
    outcome: ProcessOutcome,
    stage: Stage | None,
    devices: Mapping[str, Sequence[Device]],
    greetings: Mapping[str, Greeting],
    known: str = "",
    *,
    is_answering: bool = False,
    model: str = "",
) -> Failed | Crashed:
    """Return the final event for a child that ended or stalled while it used RPC workers.

    The event names the worker that was lost, if it is known.

    `stage`: stage of the load; None if the child was answering (`is_answering`) or idle.
    `devices`: devices that the child used, by endpoint.
    `greetings`: whether each worker still answered a check after the loss, by endpoint; empty if there was no check.
    `known`: sentences about known faults of llama.cpp with this plan. `model`: name of the model's file.
    """
    to_blame = _endpoints_to_blame(outcome, devices, greetings)
    if not to_blame:
        return crash_event(outcome, known, devices, model=model)
    # Before "allocate" the child has nothing on a worker yet: another program connected just before it.
    if stage in ("header", "fit") and all(_is_busy(greetings.get(endpoint)) for endpoint in to_blame):
        busy = refusal({endpoint: greetings[endpoint] for endpoint in to_blame}, devices)
        assert busy is not None
        return busy
    when = _when(stage, is_answering=is_answering)
    if outcome.reason is not EndReason.STALLED and all(
        _has_stopped_here(devices[endpoint], greetings.get(endpoint)) for endpoint in to_blame
    ):
        names = " + ".join(names_of(devices[endpoint]) for endpoint in to_blame)
        sentences = (tr("{names} stopped {when}.", names=names, when=when), tr("Restart the worker, then load again."))
        return Failed(kind="unreachable", message=" ".join(sentences))
    names = " or ".join(f"{names_of(devices[endpoint])} ({endpoint})" for endpoint in to_blame)
    answers = " ".join(greetings[endpoint].sentence for endpoint in to_blame if endpoint in greetings)
    what = (
        tr("{names} made no progress {when}.", names=names, when=when)
        if outcome.reason is EndReason.STALLED
        else tr("The connection to {names} was lost {when}.", names=names, when=when)
    )
    remedy = tr("Restart the RPC worker, then load again.")
    # The network broke for a moment, or the lender has started its worker again; nobody has to do anything there.
    if all(_is_back(devices[endpoint], greetings.get(endpoint)) for endpoint in to_blame):
        remedy = tr("Load the model again.")
    return Failed(kind="unreachable", message=" ".join(filter(None, (what, answers, remedy))))


def _is_busy(greeting: Greeting | None) -> bool:
    return greeting is not None and greeting.status is GreetingStatus.BUSY


def _is_back(held: Sequence[Device], greeting: Greeting | None) -> bool:
    """Return whether a paired machine's worker answers again, after the connection to it was lost.

    `held`: devices of the worker.
    `greeting`: result of the check after the connection was lost; None if there was no check.
    """
    return greeting is not None and greeting.ok and all(device.fingerprint is not None for device in held)


def _has_stopped_here(held: Sequence[Device], greeting: Greeting | None) -> bool:
    """Return whether a worker ran on this computer, and nothing listens at its port now.

    `held`: devices of the worker.
    `greeting`: result of the check after the connection was lost; None if there was no check.
    """
    # Of another machine that refuses a connection nobody knows what happened: the network may have changed.
    refused = greeting is not None and greeting.status is GreetingStatus.REFUSED
    # A paired machine may be reached at a local address, and its worker cannot be restarted from here.
    return refused and all(is_on_this_machine(device) and device.fingerprint is None for device in held)


def _endpoints_to_blame(
    outcome: ProcessOutcome, devices: Mapping[str, Sequence[Device]], greetings: Mapping[str, Greeting]
) -> list[str]:
    named = outcome.lost_endpoint
    # For a device behind a tunnel, llama.cpp connects to the tunnel's local end (`via`), and names that address.
    if named is not None and (known := [each for each, held in devices.items() if named in (each, held[0].via)]):
        return known
    unreachable = [endpoint for endpoint, greeting in greetings.items() if not greeting.ok]
    certain = [endpoint for endpoint in unreachable if greetings[endpoint].status is not GreetingStatus.BUSY]
    if certain or unreachable:
        return certain or unreachable
    # All workers answer now: one was started again, or dropped the connection. It may have been any of them.
    return list(devices) if outcome.lost_rpc else []


def _placed_bytes(parts: Sequence[BufferMemory]) -> dict[str, int]:
    placed: dict[str, int] = {}
    for part in parts:
        # Mapped weights are page cache, which the system can drop.
        weights_bytes = 0 if part.mapped else part.weights_bytes
        size_bytes = weights_bytes + part.kv_cache_bytes + part.recurrent_bytes + part.compute_bytes + part.output_bytes
        placed[part.device] = placed.get(part.device, 0) + size_bytes
    return placed


def _free_bytes(device: Device | None, reported_bytes: int | None, placed_bytes: int) -> int | None:
    """Return the free memory of a device when the allocation failed; None if unknown.

    An RPC server reports the memory of its whole machine. So the result is at most the memory that was available on
    `device` before the load, minus our allocations.

    `reported_bytes`: free memory that the device reported; None if it did not.
    `placed_bytes`: memory that we had allocated on the device before.
    """
    if device is None or (device.cap_bytes is None and device.free_bytes is None):
        return reported_bytes
    left_bytes = max(0, device.available_bytes - placed_bytes)
    return left_bytes if reported_bytes is None else min(left_bytes, reported_bytes)


def _speed(tokens: int, seconds: float) -> float:
    return tokens / seconds if seconds > 0 else 0.0

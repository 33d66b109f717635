"""Decisions on context length, batch sizes and the number of sequences."""

from __future__ import annotations

from collections.abc import Iterator

from engine.base.language import tr
from engine.base.units import GIB
from engine.base.values import replace
from engine.devices.device import Device, Rig
from engine.model.architectures.registry import find_architecture
from engine.model.gguf.model_file import ModelFile
from engine.planning.plan.decisions.decision import Decision
from engine.planning.settings.context_settings import AUTO_CONTEXT, ContextSettings
from engine.planning.settings.table import CONTEXT_STEP


def reads_whole_texts(model: ModelFile) -> bool:
    """Return whether a whole text must be in one micro batch, as for embedding models with full attention."""
    architecture = find_architecture(model.architecture)
    if model.hyper_parameter("attention.causal") is False:
        return True
    return architecture is not None and not architecture.has_cache and model.hyper_parameter("pooling_type") is not None


def default_context(model: ModelFile, n_ctx: int | None = None) -> ContextSettings:
    """Return the default settings for a context of `n_ctx` tokens.

    `n_ctx`: context length in tokens; None for the default length, or for the trained length if it is shorter.
    """
    defaults = ContextSettings()
    trained = model.n_ctx_train
    if n_ctx is None:
        # Answers get worse beyond the trained length, so a default never exceeds it.
        n_ctx = min(defaults.n_ctx, trained or defaults.n_ctx)
    if not reads_whole_texts(model):
        return replace(defaults, n_ctx=n_ctx)
    # llama.cpp refuses a text of such a model that is longer than a micro batch, so both batches get the full length.
    n_batch = n_ctx or trained or defaults.n_batch
    return replace(defaults, n_ctx=n_ctx, n_batch=n_batch, n_ubatch=n_batch)


# Just below 48 and 24 GiB, because cards report a little less than their name says.
_SENSIBLE = ((47 * GIB, 262_144), (23 * GIB, 32_768))
"""Context lengths to aim for: pairs of (memory of all cards together in bytes, context length in tokens).

The length is that of the first pair whose memory the rig's cards have, all together.
"""
_SENSIBLE_ELSEWHERE = 4096


def context_lengths(model: ModelFile, rig: Rig, context: ContextSettings) -> tuple[int, ...]:
    """Return the values of `n_ctx` to try, in order: the user's value; for "auto" several values, the longest first."""
    if context.n_ctx != AUTO_CONTEXT:
        return (context.n_ctx,)
    # The context of each request is halved, not the total, so that no request gets less than `CONTEXT_STEP` tokens.
    lengths = [sensible_length(model, rig)]
    while lengths[-1] // 2 >= CONTEXT_STEP:
        lengths.append(lengths[-1] // 2)
    return tuple(context.with_each(each).n_ctx for each in lengths)


def sensible_length(model: ModelFile, rig: Rig) -> int:
    """Return the usual context length in tokens for the device memory of `rig`; at most the trained length."""
    sensible = next((length for least, length in _SENSIBLE if _cards_bytes(rig) >= least), _SENSIBLE_ELSEWHERE)
    return min(sensible, model.n_ctx_train or sensible)


def _cards_bytes(rig: Rig) -> int:
    def size_bytes(device: Device) -> int:
        return device.total_bytes if device.cap_bytes is None else min(device.total_bytes, device.cap_bytes)

    return sum(size_bytes(device) for device in rig.devices if device.kind != "accel")


def decide_context(
    model: ModelFile, rig: Rig, asked: ContextSettings, used: ContextSettings, *, fits: bool
) -> Iterator[Decision]:
    """Yield the decisions on context length, batch sizes and sequences.

    `asked`: settings as the user left them.
    `used`: settings for the load.
    `fits`: whether a load with `used` is forecast to fit into the memory of all devices.
    """
    yield Decision("n_ctx", used.n_ctx, _length_reason(model, rig, asked, used, fits=fits), _is_chosen(model, asked))
    yield from _batches(model, used)
    if used.n_seq_max > 1:
        reason = (
            tr("Set explicitly: {n_seq_max} conversations share one context.", n_seq_max=used.n_seq_max)
            if used.kv_unified
            else tr(
                "Set explicitly: each of {n_seq_max} conversations gets a context of {n_ctx_each} tokens.",
                n_seq_max=used.n_seq_max,
                n_ctx_each=used.n_ctx_each,
            )
        )
        yield Decision("n_seq_max", used.n_seq_max, reason, True)


def _is_chosen(model: ModelFile, asked: ContextSettings) -> bool:
    return asked.n_ctx_each not in (AUTO_CONTEXT, ContextSettings().n_ctx, default_context(model).n_ctx)


def _length_reason(model: ModelFile, rig: Rig, asked: ContextSettings, used: ContextSettings, *, fits: bool) -> str:
    trained, each = model.n_ctx_train, used.n_ctx_each
    if asked.n_ctx == AUTO_CONTEXT:
        aim = sensible_length(model, rig)
        if each < aim:
            shared = tr(" for each of {n_seq_max} requests", n_seq_max=used.n_seq_max) if used.n_ctx != each else ""
            return (
                tr(
                    "The longest context that fits; {tokens} tokens{shared} would not fit.",
                    tokens=2 * each,
                    shared=shared,
                )
                if fits
                else tr("No context length fits on these devices.")
            )
        if aim == trained:
            return tr("The whole trained context length, {trained} tokens.", trained=trained)
        return tr(
            "The usual context length for {cards} GiB of device memory; you can choose a longer context.",
            cards=_cards_bytes(rig) // GIB,
        )
    if _is_chosen(model, asked):
        if trained is not None and each > trained:
            return tr(
                "Set explicitly. The context is longer than the trained length of {trained} tokens.", trained=trained
            )
        return tr("Set explicitly.")
    if trained == each:
        return tr("The trained context length, {trained} tokens; you can choose a longer context.", trained=trained)
    return tr("The default context length.")


def _batches(model: ModelFile, used: ContextSettings) -> Iterator[Decision]:
    usual = default_context(model, used.n_ctx_each)
    # llama.cpp refuses a text of such a model if it does not fit into one micro batch.
    whole = reads_whole_texts(model)
    for setting, value, default in (
        ("n_batch", used.n_batch, usual.n_batch),
        ("n_ubatch", used.n_ubatch, usual.n_ubatch),
    ):
        if whole and value < used.n_ctx_each:
            reason = tr(
                "This model reads a text in one batch, so a text can have only {value} tokens, although the context "
                "has {n_ctx_each}.",
                value=value,
                n_ctx_each=used.n_ctx_each,
            )
            yield Decision(setting, value, reason, value != default)
        elif whole:
            yield Decision(
                setting, value, tr("As large as the context, because this model must read each text in one batch.")
            )
        elif value != default:
            yield Decision(setting, value, tr("Set explicitly."), True)

"""How long the context is if nobody chose a length, and how it is read in."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from engine.base.language import tr
from engine.base.units import GIB
from engine.devices.device import Device, Rig
from engine.model.architectures.registry import find_architecture
from engine.model.gguf.model_file import ModelFile
from engine.planning.plan.decisions.decision import Decision
from engine.planning.settings.context_settings import AUTO_CONTEXT, ContextSettings
from engine.planning.settings.table import CONTEXT_STEP


def trained_length(model: ModelFile) -> int | None:
    """Return how many tokens the model was trained with at most; None where the file does not say."""
    trained = model.hyper_parameter("context_length")
    usable = isinstance(trained, int) and not isinstance(trained, bool) and 0 < trained < 1 << 31
    return trained if usable and isinstance(trained, int) else None


def reads_whole_texts(model: ModelFile) -> bool:
    """Return whether the model looks at a text as a whole, as embedding models do: all of it is one micro batch."""
    architecture = find_architecture(model.architecture)
    if model.hyper_parameter("attention.causal") is False:
        return True
    return architecture is not None and not architecture.has_cache and model.hyper_parameter("pooling_type") is not None


def default_context(model: ModelFile, n_ctx: int | None = None) -> ContextSettings:
    """Return our defaults for a context of `n_ctx` tokens; None: no more than the model was trained for.

    A model that reads whole texts gets batches as long as its context: the engine refuses a text that needs two.
    """
    defaults = ContextSettings()
    trained = trained_length(model)
    if n_ctx is None:
        n_ctx = min(defaults.n_ctx, trained or defaults.n_ctx)
    if not reads_whole_texts(model):
        return msgspec.structs.replace(defaults, n_ctx=n_ctx)
    n_batch = n_ctx or trained or defaults.n_batch
    return msgspec.structs.replace(defaults, n_ctx=n_ctx, n_batch=n_batch, n_ubatch=n_batch)


_SENSIBLE = ((47 * GIB, 262_144), (23 * GIB, 32_768))
"""By the memory of all cards: how much context people there have use for."""
_SENSIBLE_ELSEWHERE = 4096


def context_lengths(model: ModelFile, rig: Rig, context: ContextSettings) -> tuple[int, ...]:
    """Return the values of `n_ctx` to try, the most wanted first: the one that was chosen, or ever shorter ones.

    What is halved is the context of each request: a total could leave a request with less than the engine's least.
    """
    if context.n_ctx != AUTO_CONTEXT:
        return (context.n_ctx,)
    lengths = [sensible_length(model, rig)]
    while lengths[-1] // 2 >= CONTEXT_STEP:
        lengths.append(lengths[-1] // 2)
    return tuple(context.with_each(each).n_ctx for each in lengths)


def sensible_length(model: ModelFile, rig: Rig) -> int:
    """Return the tokens of context to aim for on devices with this much memory, at most what was trained."""
    sensible = next((length for least, length in _SENSIBLE if _cards_bytes(rig) >= least), _SENSIBLE_ELSEWHERE)
    return min(sensible, trained_length(model) or sensible)


def _cards_bytes(rig: Rig) -> int:
    def size_bytes(device: Device) -> int:
        return device.total_bytes if device.cap_bytes is None else min(device.total_bytes, device.cap_bytes)

    return sum(size_bytes(device) for device in rig.devices if device.kind != "accel")


def decide_context(
    model: ModelFile, rig: Rig, asked: ContextSettings, used: ContextSettings, *, fits: bool
) -> Iterator[Decision]:
    """Yield what became of context length, batches and sequences; `fits`: whether the forecast has room for them."""
    yield Decision("n_ctx", used.n_ctx, _length_reason(model, rig, asked, used, fits=fits), _is_chosen(model, asked))
    yield from _batches(model, used)
    if used.n_seq_max > 1:
        shares = (
            tr("share one context")
            if used.kv_unified
            else tr("get {n_ctx_each} tokens each", n_ctx_each=used.n_ctx_each)
        )
        yield Decision(
            "n_seq_max",
            used.n_seq_max,
            tr("Chosen: {n_seq_max} conversations {shares}.", n_seq_max=used.n_seq_max, shares=shares),
            True,
        )


def _is_chosen(model: ModelFile, asked: ContextSettings) -> bool:
    return asked.n_ctx_each not in (AUTO_CONTEXT, ContextSettings().n_ctx, default_context(model).n_ctx)


def _length_reason(model: ModelFile, rig: Rig, asked: ContextSettings, used: ContextSettings, *, fits: bool) -> str:
    trained, each = trained_length(model), used.n_ctx_each
    if asked.n_ctx == AUTO_CONTEXT:
        aim = sensible_length(model, rig)
        if each < aim:
            shared = tr(" for each of {n_seq_max} requests", n_seq_max=used.n_seq_max) if used.n_ctx != each else ""
            return (
                tr("The longest that fits: {what} tokens{shared} would not.", what=2 * each, shared=shared)
                if fits
                else tr("No length fits here.")
            )
        if aim == trained:
            return tr("All of what the model was trained with, {trained} tokens.", trained=trained)
        return tr("What {cards} GiB on devices suggest; more can be chosen.", cards=_cards_bytes(rig) // GIB)
    if _is_chosen(model, asked):
        if trained is not None and each > trained:
            return tr("Chosen, and longer than the {trained} tokens that the model was trained with.", trained=trained)
        return tr("Chosen.")
    if trained == each:
        return tr("What the model was trained with, {trained} tokens; more has to be chosen.", trained=trained)
    return tr("What is used unless another length is chosen.")


def _batches(model: ModelFile, used: ContextSettings) -> Iterator[Decision]:
    usual = default_context(model, used.n_ctx_each)
    whole = reads_whole_texts(model)
    for setting, value, default in (
        ("n_batch", used.n_batch, usual.n_batch),
        ("n_ubatch", used.n_ubatch, usual.n_ubatch),
    ):
        if whole and value < used.n_ctx_each:
            reason = tr(
                "This model reads a text in one piece, and takes {value} tokens of the {n_ctx_each} at once.",
                value=value,
                n_ctx_each=used.n_ctx_each,
            )
            yield Decision(setting, value, reason, value != default)
        elif whole:
            yield Decision(setting, value, tr("As long as the context: this model reads a text in one piece."))
        elif value != default:
            yield Decision(setting, value, tr("Chosen."), True)

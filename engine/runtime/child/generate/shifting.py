"""Context shift: when the context is full, older tokens are removed so that the answer can continue.

As in llama.cpp's server, the first tokens stay, the older half of the others is removed from the KV cache, and the
newer half moves to their positions (`llama_memory_seq_rm`, `llama_memory_seq_add`; llama.cpp rotates K with the next
batch). The state of the moved tokens was computed with the removed tokens before them. So a later prompt can use only
the state of the first tokens (`Slot.exact`), and a shifted state is not saved.
"""

from __future__ import annotations

from collections.abc import Sequence

from engine.base.values import replace
from engine.planning.settings.context_settings import is_quantised
from engine.planning.settings.sampling_settings import SamplingSettings
from engine.runtime.child.generate.prompt import Replaced, chat_text, prompt_of
from engine.runtime.child.generate.slots import common_prefix
from engine.runtime.child.load.loaded_context import LoadedContext
from engine.runtime.child.load.media import MediaPrompt
from engine.runtime.child.native.failures import failure
from engine.runtime.protocol.requests import ChatMessage, Generate

KEPT_SHARE = 0.75
"""Largest share of the context that may stay at each shift.

With a larger share, shifts would follow each other quickly.
"""
_OTHER_TEXTS = ("0", "1")
"""Two texts with different first characters. One of them replaces a message to find where it begins in the prompt."""


def kept_tokens(
    loaded: LoadedContext, request: Generate, settings: SamplingSettings, prompt: MediaPrompt, replaced: Replaced
) -> int | None:
    """Return how many tokens at the start of the prompt stay in the KV cache at a context shift.

    Return None if the context is not shifted, so that the answer ends when the context is full.

    `replaced`: whether ChatML replaced the chat template, and why.

    Raises:
        RequestError: the request demands a shift, and none is possible. The sentence names the reason.
    """
    if settings.full_context != "shift":
        return None
    reason = _refusal(loaded, prompt, replaced)
    if reason:
        raise failure("argument", f"{reason} Set “Context overflow” to end, then ask again.")
    kept, room = settings.keep_tokens, loaded.context_tokens
    if kept is None:
        kept = _beginning(loaded, request, prompt.tokens)
    if kept > room * KEPT_SHARE:
        raise failure(
            "argument",
            f"A full context cannot be shifted: {kept} of {room} tokens would be kept. Keep at most "
            f"{int(room * KEPT_SHARE)}, shorten the system prompt, or load with a longer context.",
        )
    return kept


def _refusal(loaded: LoadedContext, prompt: MediaPrompt, replaced: Replaced) -> str:
    """Return why the context of this request cannot be shifted, as a sentence; empty if it can.

    `replaced`: whether ChatML replaced the chat template, and why.
    """
    low, settings = loaded.engine.low, loaded.settings
    if loaded.has_recurrent_state:
        return "A full context cannot be shifted: this model has recurrent state, from which no token can be removed."
    if is_quantised(settings.type_k) or is_quantised(settings.type_v):
        return (
            f"A full context cannot be shifted: the KV cache is quantised ({settings.type_k} and {settings.type_v}), "
            "and would lose precision with each shift. Load with f16, bf16 or f32."
        )
    if loaded.has_window_cache:
        return (
            "A full context cannot be shifted: sliding-window layers have a cache of the window's length. Load with "
            "the full-size SWA cache."
        )
    # False for M-RoPE, whose positions have several numbers, and for Step35 (llama_kv_cache::get_can_shift).
    if not low.llama_memory_can_shift(loaded.memory):
        return "A full context cannot be shifted: this model's positions do not allow it."
    # In one stream a copied prefix shares its cells, which a shift would move for both sequences.
    if settings.kv_unified and loaded.n_sequences > 1:
        return "A full context cannot be shifted: all requests share one KV cache. Turn the unified KV cache off."
    if prompt.parts:
        return "A full context cannot be shifted: this conversation has images or sounds."
    if replaced.sentence:
        return "A full context cannot be shifted: the chat template failed, so that the start of the prompt is unknown."
    return ""


def _beginning(loaded: LoadedContext, request: Generate, tokens: Sequence[int]) -> int:
    """Return the number of prompt tokens before the first message that is not a system prompt.

    The function compares the prompt with one in which that message begins differently, and counts the common prefix.

    `tokens`: tokens of the prompt.
    """
    index = next((index for index, each in enumerate(request.messages) if each.role != "system"), None)
    if index is None:
        # A raw prompt, or nothing but a system prompt: BOS stays, which models need at the start.
        begin = int(loaded.engine.low.llama_vocab_bos(loaded.vocabulary))
        return int(tokens[:1] == (begin,))
    first = request.messages[index]
    other = next(each for each in _OTHER_TEXTS if not first.content.startswith(each))
    messages: list[ChatMessage] = [*request.messages]
    messages[index] = replace(first, content=other)
    text, replaced = chat_text(loaded, messages, request.template, request.template_input)
    if replaced.sentence:
        raise failure(
            "argument",
            "A full context cannot be shifted: the chat template does not show where the first message begins. Set "
            "how many first tokens are kept, or end answers when the context is full.",
        )
    return common_prefix(tokens, prompt_of(loaded, text).tokens)

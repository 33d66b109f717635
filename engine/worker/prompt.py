"""From a request to the tokens of its prompt."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from engine.protocol.messages import ChatMessage
from engine.worker.loaded_context import LoadedContext
from engine.worker.outcome import failure
from engine.worker.text import token_text, tokenize


def prompt_tokens(loaded: LoadedContext, messages: Sequence[ChatMessage], prompt: str) -> list[int]:
    """Return the tokens of a conversation, or of raw text where there is none.

    Raises:
        EndOfRequest: with a `Failure`: it is empty, or too long for the context of one request.
    """
    text = chat_text(loaded, messages)[0] if messages else prompt
    begin = token_text(loaded, loaded.engine.low.llama_vocab_bos(loaded.vocabulary))
    # a template that writes the first token itself must not get a second one
    tokens = tokenize(loaded, text, add_special=not (begin and text.startswith(begin)))
    room = loaded.context_tokens
    if not tokens:
        raise failure("argument", "The prompt is empty; write something.")
    if len(tokens) >= room:
        raise failure(
            "argument",
            f"The conversation takes {len(tokens)} tokens and the context holds {room}, one of them for the answer."
            " Shorten or clear the conversation, or load with a longer context.",
        )
    return tokens


def chat_text(loaded: LoadedContext, messages: Sequence[ChatMessage]) -> tuple[str, str]:
    """Return a conversation by the model's template, and why a plain form took its place, if it did for a fault."""
    # imported with the first conversation: a template engine is a lot to import for raw text
    from engine.worker.chat_template import TemplateError, render_chat, render_plain_chat

    low = loaded.engine.low
    template = low.llama_model_chat_template(loaded.model, None)
    replaced = ""
    if template:
        try:
            text = render_chat(
                template.decode("utf-8", "replace"),
                messages,
                beginning_of_text=token_text(loaded, low.llama_vocab_bos(loaded.vocabulary)),
                end_of_text=token_text(loaded, low.llama_vocab_eos(loaded.vocabulary)),
            )
        except TemplateError as error:
            replaced = f"The model's chat template is not used: {error}."
            print(replaced, file=sys.stderr, flush=True)
        else:
            return text, ""
    return render_plain_chat(messages), replaced

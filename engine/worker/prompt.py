"""From a request to the tokens of its prompt."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import TYPE_CHECKING

from engine.protocol.messages import ChatMessage
from engine.worker.loaded_context import LoadedContext
from engine.worker.outcome import failure
from engine.worker.text import token_text, tokenize
from engine.worker.turn_marks import turn_marks

if TYPE_CHECKING:
    from engine.worker.template_process import TemplateProcess


def prompt_tokens(
    loaded: LoadedContext, messages: Sequence[ChatMessage], prompt: str, template: str = ""
) -> tuple[list[int], str, tuple[int, ...]]:
    """Return the tokens of a conversation, or of raw text where there is none, what `chat_text` has to say, and the
    `turn_marks`.

    Raises:
        EndOfRequest: with a `Failure`: it is empty, or too long for the context of one request.
    """
    text, replaced = chat_text(loaded, messages, template) if messages else (prompt, "")
    tokens = tokens_of_prompt(loaded, text)
    room = loaded.context_tokens
    if not tokens:
        raise failure("argument", "The prompt is empty; write something.")
    if len(tokens) >= room:
        raise failure(
            "argument",
            f"The conversation takes {len(tokens)} tokens and the context holds {room}, one of them for the answer."
            " Shorten or clear the conversation, or load with a longer context.",
        )
    return tokens, replaced, turn_marks(loaded, text, messages, len(tokens))


def tokens_of_prompt(loaded: LoadedContext, text: str) -> list[int]:
    """Return the tokens of a whole prompt: a template that writes the first one itself does not get a second."""
    begin = token_text(loaded, loaded.engine.low.llama_vocab_bos(loaded.vocabulary))
    return tokenize(loaded, text, add_special=not (begin and text.startswith(begin)))


def chat_text(loaded: LoadedContext, messages: Sequence[ChatMessage], template: str = "") -> tuple[str, str]:
    """Return a conversation by `template`, or the model's own, and why a plain form took its place, if it did for a
    fault."""
    # imported with the first conversation: a template engine is a lot to import for raw text
    from engine.worker.chat_template import TemplateError, render_plain_chat

    low = loaded.engine.low
    owner = "chat" if template else "model"
    own = low.llama_model_chat_template(loaded.model, None)
    template = template or (own or b"").decode("utf-8", "replace")
    replaced = ""
    if template:
        try:
            text = _templates().render(
                template,
                messages,
                beginning_of_text=token_text(loaded, low.llama_vocab_bos(loaded.vocabulary)),
                end_of_text=token_text(loaded, low.llama_vocab_eos(loaded.vocabulary)),
            )
        except TemplateError as error:
            whose = "The model's chat template" if owner == "model" else "The template that was set for this chat"
            replaced = f"{whose} is not used, but a plain form that many models know: {error}."
        else:
            return text, ""
    return render_plain_chat(messages), replaced


@cache
def _templates() -> TemplateProcess:
    from engine.worker.template_process import TemplateProcess

    return TemplateProcess()

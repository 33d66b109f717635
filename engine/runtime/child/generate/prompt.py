"""From a request to the tokens of its prompt, and where its answer begins."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import NamedTuple

from engine.runtime.child.generate.chat_template import TemplateError, TemplateProcess, render_plain_chat
from engine.runtime.child.generate.checkpoints import checkpoint_positions
from engine.runtime.child.generate.text import piece_text, token_text, tokenize
from engine.runtime.child.load.loaded_context import LoadedContext
from engine.runtime.child.load.media import Media, MediaPrompt
from engine.runtime.child.native.failures import failure
from engine.runtime.protocol.messages import ChatMessage, Generate, ImageFile, MediaFile, SoundFile

_REMEDY = (
    "Choose the model's projector (its mmproj file) beside the model in the settings, and load again; where one is"
    " loaded, choose another."
)


class Replaced(NamedTuple):
    """Why a plain form took the place of a chat template; empty where none did. `for_log` quotes no conversation."""

    sentence: str = ""
    for_log: str = ""


NOT_REPLACED = Replaced()


def read_prompt(
    loaded: LoadedContext, messages: Sequence[ChatMessage], prompt: str, template: str = ""
) -> tuple[MediaPrompt, Replaced, tuple[int, ...]]:
    """Return the prompt of a conversation, or of raw text where there is none, what `chat_text` has to say, and the
    `checkpoint_positions`.

    Raises:
        EndOfRequest: with a `Failure`: it is empty, or too long for the context of one request.
    """
    text, replaced = chat_text(loaded, messages, template) if messages else (prompt, NOT_REPLACED)
    found = prompt_of(loaded, text, media_of(messages))
    count, room = found.cells(found.tokens), loaded.context_tokens
    if not count:
        raise failure("argument", "The prompt is empty; write something.")
    if count >= room:
        raise failure(
            "argument",
            f"The conversation takes {count} tokens and the context holds {room}, one of them for the answer."
            " Shorten or clear the conversation, or load with a longer context.",
        )
    if found.tokens[-1] < 0:
        raise failure("argument", "The chat template writes nothing after an image or a sound; write a question to it.")
    _check_batches(loaded, found)
    return found, replaced, checkpoint_positions(loaded, text, messages, len(found.tokens))


def prompt_of(loaded: LoadedContext, text: str, files: Sequence[MediaFile] = ()) -> MediaPrompt:
    """Return a whole prompt: a template that writes the first token itself does not get a second.

    Raises:
        EndOfRequest: with a `Failure`, where nothing that is loaded reads its images or sounds.
    """
    begin = token_text(loaded, loaded.engine.low.llama_vocab_bos(loaded.vocabulary))
    add_special = not (begin and text.startswith(begin))
    if files:
        return senses_of(loaded, files).prompt(text, files, add_special=add_special)
    return MediaPrompt(tokens=tuple(tokenize(loaded, text, add_special=add_special)))


def media_of(messages: Sequence[ChatMessage]) -> tuple[MediaFile, ...]:
    """Return the images and sounds of a conversation, in their order."""
    return tuple(file for message in messages for file in message.media)


def senses_of(loaded: LoadedContext, files: Sequence[MediaFile]) -> Media:
    """Return what reads these.

    Raises:
        EndOfRequest: with a `Failure`, where nothing does.
    """
    media = loaded.media
    has_images = any(isinstance(file, ImageFile) for file in files)
    has_sounds = any(isinstance(file, SoundFile) for file in files)
    if has_images and not (media is not None and media.sees):
        raise failure("argument", f"This conversation has images, and nothing is loaded that reads them. {_REMEDY}")
    if has_sounds and not (media is not None and media.hears):
        raise failure("argument", f"This conversation has sound, and nothing is loaded that hears it. {_REMEDY}")
    assert media is not None
    return media


def _check_batches(loaded: LoadedContext, prompt: MediaPrompt) -> None:
    """End the request where an image or a sound that cannot be cut is larger than a batch: the engine would abort."""
    most = min(loaded.batch_tokens, int(loaded.engine.low.llama_n_ubatch(loaded.context)))
    whole = max((part.n_cells for part in prompt.parts.values() if part.at_once), default=0)
    if whole > most:
        raise failure(
            "argument",
            f"This model reads an image or a sound of {whole} tokens at once, and was loaded with batches of {most}."
            f" Load with n_batch and n_ubatch of {whole} at least.",
        )


def _with_markers(loaded: LoadedContext, message: ChatMessage) -> ChatMessage:
    if not message.media:
        return message
    marks = senses_of(loaded, message.media).marker * len(message.media)
    return ChatMessage(message.role, f"{marks}{message.content}")


def chat_text(loaded: LoadedContext, messages: Sequence[ChatMessage], template: str = "") -> tuple[str, Replaced]:
    """Return a conversation by `template`, or the model's own, and why a plain form took its place, if it did for a
    fault."""
    messages = [_with_markers(loaded, message) for message in messages]
    low = loaded.engine.low
    owner = "chat" if template else "model"
    own = low.llama_model_chat_template(loaded.model, None)
    template = template or (own or b"").decode("utf-8", "replace")
    replaced = NOT_REPLACED
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
            instead = f"{whose} is not used, but a plain form that many models know"
            replaced = Replaced(f"{instead}: {error}.", f"{instead}: {error.for_log}.")
        else:
            return text, NOT_REPLACED
    return render_plain_chat(messages), replaced


@cache
def _templates() -> TemplateProcess:
    return TemplateProcess()


_END_TOKENS = 16
"""How much of a prompt's end is looked at for a mark."""


def with_begun(loaded: LoadedContext, request: Generate, read: MediaPrompt) -> tuple[list[int], str]:
    """Return the prompt with what the answer begins with already, and what is to be told first: an open mark.

    Raises:
        EndOfRequest: with a `Failure`, where that is too long for the context.
    """
    prompt = read.tokens
    end = "".join(piece_text(loaded, token) for token in prompt[-_END_TOKENS:] if token >= 0).rstrip()
    marks = next((marks for marks in request.thinking if end.endswith(marks[0])), None)
    if not request.begun:
        return [*prompt], "" if marks is None else marks[0]
    begun = request.begun
    if marks is not None:
        # the template has begun a thought, which is to be the one that is there, or none
        begun = begun[len(marks[0]) :] if begun.startswith(marks[0]) else f"{marks[1]}\n\n{begun}"
    tokens = [*prompt, *tokenize(loaded, begun, add_special=False)]
    count = read.cells(tokens)
    if count >= loaded.context_tokens:
        raise failure(
            "argument",
            f"With what was said of it the answer takes {count} tokens and the context holds"
            f" {loaded.context_tokens}. Load with a longer context to go on.",
        )
    return tokens, ""

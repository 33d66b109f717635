"""Makes the tokens of a prompt from a request: chat template, images and sounds, start of the answer."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import NamedTuple

from engine.base.values import replace
from engine.runtime.child.generate.chat_template import TemplateError, TemplateProcess, render_plain_chat
from engine.runtime.child.generate.checkpoints import checkpoint_positions
from engine.runtime.child.generate.markup import (
    GuessedMarkError,
    PromptText,
    render_shielded,
    tokenize_prompt,
    without_markup,
)
from engine.runtime.child.generate.text import piece_text, token_text, tokenizer_limit
from engine.runtime.child.load.loaded_context import LoadedContext
from engine.runtime.child.load.media import Media, MediaPrompt
from engine.runtime.child.native.failures import failure
from engine.runtime.protocol.requests import (
    NO_INPUT,
    ChatMessage,
    Generate,
    ImageFile,
    MediaFile,
    SoundFile,
    TemplateInput,
)

_FILE_SIZE = 1 << 20
"""Size in bytes with which each image or sound counts in the limit for tokenising a prompt (`tokenizer_limit`).

Images and sounds are not decoded in this step.
"""
_REMEDY = (
    "Choose the model's projector (mmproj file) in the settings, and load again. If one is loaded, choose another one."
)


class Replaced(NamedTuple):
    """Why ChatML was used instead of a chat template, as a sentence; empty if the template did not fail.

    `for_log`: the reason without quotations from the conversation.
    """

    sentence: str = ""
    for_log: str = ""


NOT_REPLACED = Replaced()


def read_prompt(
    loaded: LoadedContext,
    messages: Sequence[ChatMessage],
    prompt: str,
    template: str = "",
    template_input: TemplateInput = NO_INPUT,
) -> tuple[MediaPrompt, Replaced, tuple[int, ...]]:
    """Return the prompt of a request, the reason if ChatML replaced its chat template, and the positions for
    checkpoints.

    `messages`: the conversation.
    `prompt`: raw text, used if there are no messages.
    `template`: chat template; empty for the model's own.
    `template_input`: tools and further variables of the template.

    Raises:
        RequestError: the prompt is empty, or too long for the context of one request.
    """
    text, replaced = PromptText(prompt), NOT_REPLACED
    if messages:
        text, replaced = chat_text(loaded, messages, template, template_input)
    found = prompt_of(loaded, text, media_of(messages))
    count, room = found.cells(found.tokens), loaded.context_tokens
    if not count:
        raise failure("argument", "The prompt is empty; write something.")
    # One cell must be left for the first token of the answer.
    if count >= room:
        raise failure(
            "argument",
            f"The conversation takes {count} tokens, but the context holds {room}, including one for the answer."
            " Shorten the conversation, or load with a longer context.",
        )
    if found.tokens[-1] < 0:
        raise failure(
            "argument", "The chat template adds nothing after an image or a sound; write a question about it."
        )
    _check_batches(loaded, found)
    return found, replaced, checkpoint_positions(loaded, text.text, messages, len(found.tokens))


def prompt_of(loaded: LoadedContext, prompt: PromptText, files: Sequence[MediaFile] = ()) -> MediaPrompt:
    """Return a prompt as tokens, with BOS unless the template has written it.

    `files`: images and sounds of the prompt, in their order.

    Raises:
        RequestError: no projector for its images or sounds is loaded.
    """
    begin = token_text(loaded, loaded.engine.low.llama_vocab_bos(loaded.vocabulary))
    # A literal name of BOS at the start is text of the conversation.
    is_literal = bool(prompt.literal) and prompt.literal[0][0] == 0
    add_special = is_literal or not (begin and prompt.text.startswith(begin))
    if files:
        media, text = media_for(loaded, files), prompt.broken
        # mtmd tokenises the text between the files by the model's vocabulary.
        with tokenizer_limit(loaded, len(text.encode("utf-8", "replace")) + len(files) * _FILE_SIZE):
            return media.prompt(text, files, add_special=add_special)
    return MediaPrompt(tokens=tuple(tokenize_prompt(loaded, prompt, add_special=add_special)))


def media_of(messages: Sequence[ChatMessage]) -> tuple[MediaFile, ...]:
    """Return the images and sounds of a conversation in their order."""
    return tuple(file for message in messages for file in message.media)


def media_for(loaded: LoadedContext, files: Sequence[MediaFile]) -> Media:
    """Return the loaded projector, after checking that it can read all of `files`.

    Raises:
        RequestError: no projector is loaded, or it cannot read one of the files.
    """
    media = loaded.media
    has_images = any(isinstance(file, ImageFile) for file in files)
    has_sounds = any(isinstance(file, SoundFile) for file in files)
    if has_images and not (media is not None and media.reads_images):
        raise failure(
            "argument", f"This conversation has images, but no projector that reads images is loaded. {_REMEDY}"
        )
    if has_sounds and not (media is not None and media.reads_sound):
        raise failure(
            "argument", f"This conversation has sound, but no projector that reads sound is loaded. {_REMEDY}"
        )
    assert media is not None
    return media


def _check_batches(loaded: LoadedContext, prompt: MediaPrompt) -> None:
    """Raise `RequestError` if an image or sound that must be computed in one batch has more tokens than a batch.

    llama.cpp would abort.
    """
    most = min(loaded.batch_tokens, int(loaded.engine.low.llama_n_ubatch(loaded.context)))
    whole = max((part.n_cells for part in prompt.parts.values() if part.at_once), default=0)
    if whole > most:
        raise failure(
            "argument",
            f"This model reads an image or a sound of {whole} tokens at once, but was loaded with batches of {most}."
            f" Load with n_batch and n_ubatch of {whole} at least.",
        )


def _with_markers(loaded: LoadedContext, message: ChatMessage) -> ChatMessage:
    if not message.media:
        return message
    marks = media_for(loaded, message.media).marker * len(message.media)
    return replace(message, content=f"{marks}{message.content}", media=())


def chat_text(
    loaded: LoadedContext,
    messages: Sequence[ChatMessage],
    template: str = "",
    template_input: TemplateInput = NO_INPUT,
) -> tuple[PromptText, Replaced]:
    """Return the prompt of a conversation as text, and the reason if ChatML replaced a chat template that failed.

    Names of special tokens in the conversation are plain text (`markup.py`).

    `template`: chat template; empty for the model's own. For a model without one ChatML is used.
    `template_input`: further variables of the template.
    """
    low = loaded.engine.low
    owner = "chat" if template else "model"
    own = low.llama_model_chat_template(loaded.model, None)
    template = template or (own or b"").decode("utf-8", "replace")
    special = loaded.special_tokens
    replaced = NOT_REPLACED

    def render(shielded: Sequence[ChatMessage], shielded_input: TemplateInput) -> str:
        return _templates().render(
            template,
            [_with_markers(loaded, message) for message in shielded],
            shielded_input,
            beginning_of_text=token_text(loaded, low.llama_vocab_bos(loaded.vocabulary)),
            end_of_text=token_text(loaded, low.llama_vocab_eos(loaded.vocabulary)),
        )

    def render_plain(shielded: Sequence[ChatMessage], _: TemplateInput) -> str:
        return render_plain_chat([_with_markers(loaded, message) for message in shielded])

    if template:
        try:
            return render_shielded(special, messages, template_input, render), NOT_REPLACED
        except (TemplateError, GuessedMarkError) as error:
            whose = "The model's chat template" if owner == "model" else "The template that was set for this chat"
            instead = f"{whose} is not used; a common plain format replaces it"
            for_log = error.for_log if isinstance(error, TemplateError) else str(error)
            replaced = Replaced(f"{instead}: {error}.", f"{instead}: {for_log}.")
    return render_shielded(special, messages, template_input, render_plain), replaced


@cache
def _templates() -> TemplateProcess:
    return TemplateProcess()


_END_TOKENS = 16
"""Number of tokens at the end of a prompt in which an opening reasoning tag is searched for."""


def with_answer_start(loaded: LoadedContext, request: Generate, read: MediaPrompt) -> tuple[list[int], str]:
    """Return the prompt's tokens with the start of the answer (`Generate.begun`), and the text to send first.

    The text to send first is the opening reasoning tag if the template has written one at the end of the prompt, else
    empty.

    `read`: the prompt.

    Raises:
        RequestError: the tokens are too many for the context.
    """
    prompt = read.tokens
    end = "".join(piece_text(loaded, token) for token in prompt[-_END_TOKENS:] if token >= 0).rstrip()
    marks = next((marks for marks in request.thinking if end.endswith(marks[0])), None)
    if not request.begun:
        return [*prompt], "" if marks is None else marks[0]
    begun = request.begun
    if marks is not None:
        # The template has opened the reasoning. The start of the answer continues it, or closes it at once.
        begun = begun[len(marks[0]) :] if begun.startswith(marks[0]) else f"{marks[1]}\n\n{begun}"
    # What the model or a person wrote so far is plain text, except for the tags that the reader asked for.
    start = without_markup(loaded.special_tokens, begun, request.marks)
    tokens = [*prompt, *tokenize_prompt(loaded, start, add_special=False)]
    count = read.cells(tokens)
    if count >= loaded.context_tokens:
        raise failure(
            "argument",
            f"The conversation and the beginning of the answer take {count} tokens, but the context holds"
            f" {loaded.context_tokens}. Load with a longer context to go on.",
        )
    return tokens, ""

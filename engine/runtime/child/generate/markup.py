"""Prevents special tokens in messages, files and results of tools from being read as markup of the chat template.

llama.cpp finds special tokens by their names anywhere in a text. So a message or an attached file with `<|im_end|>` in
it could end the turn and begin a system turn. Before the template is rendered, names of special tokens in a
conversation are therefore replaced by random placeholders that nobody can guess. Afterwards the names are put back, and
this module divides the text at special tokens as `tokenizer_st_partition` of llama-vocab.cpp does, except inside these
names.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Callable, Collection, Sequence
from itertools import chain
from typing import Any, NamedTuple

from engine.base.values import replace
from engine.runtime.child.generate.text import tokenize
from engine.runtime.child.load.loaded_context import LoadedContext
from engine.runtime.child.load.special_tokens import SpecialTokens
from engine.runtime.protocol.requests import ChatMessage, TemplateInput

_BREAK = "\N{ZERO WIDTH SPACE}"
_SPACES = " \t\n\v\f\r"
"""Characters that C's `isspace` accepts. Python's `strip` removes more, such as the ideographic space."""


class PromptText(NamedTuple):
    """The text of a prompt.

    `literal`: character ranges (start, end) that are never read as special tokens, ascending.
    """

    text: str
    literal: tuple[tuple[int, int], ...] = ()

    @property
    def broken(self) -> str:
        """The text with a zero-width space inserted in each range of `literal`.

        So mtmd, llama.cpp's multimodal library, does not read these ranges as special tokens.
        """
        text = self.text
        for start, _ in reversed(self.literal):
            text = f"{text[: start + 1]}{_BREAK}{text[start + 1 :]}"
        return text


class GuessedMarkError(Exception):
    """Error: the template has changed a placeholder, so text of a message cannot be distinguished from markup."""

    def __init__(self) -> None:
        super().__init__("it changes text that looks like its own markup")


def without_markup(special: SpecialTokens, text: str, allowed: Collection[str] = ()) -> PromptText:
    """Return a text in which names of special tokens are plain text, except those in `allowed`."""
    found = special.names.finditer(text) if special.names is not None else ()
    return PromptText(text, tuple(match.span() for match in found if match[0] not in allowed))


class Shield:
    """Replaces names of special tokens in a conversation by placeholders, and puts them back in the prompt.

    Use a new object for each prompt. A template never sees a name that the conversation contains, and nobody who writes
    the conversation knows the placeholders.
    """

    def __init__(self, special: SpecialTokens) -> None:
        self._special = special
        self._nonce = f"q{secrets.token_hex(8)}q"
        self._names: list[str] = []
        self._placeholder = re.compile(rf"{self._nonce}(\d+)z")

    def messages(self, messages: Sequence[ChatMessage], *, changed: Sequence[bool] = ()) -> list[ChatMessage]:
        """Return messages with placeholders for the names of special tokens.

        `changed`: for each message, whether the template changes its text; empty if it changes none. By removing text
        the template may join two halves of a name. So in a changed message every character that can begin a name is
        replaced.
        """
        strict = changed or [False] * len(messages)
        return [self._message(each, is_changed) for each, is_changed in zip(messages, strict, strict=True)]

    def template_input(self, template_input: TemplateInput) -> TemplateInput:
        """Return the template's input with placeholders in the tool definitions. Other variables (`values`) are
        unchanged.
        """
        return replace(template_input, tools=self._shielded_json(template_input.tools))

    def prompt(self, rendered: str) -> PromptText:
        """Replace the placeholders in a rendered prompt by the names of special tokens that they stand for.

        Raises:
            GuessedMarkError: the template has cut or changed a placeholder.
        """
        if not self._names:
            return PromptText(rendered)
        parts: list[str] = []
        literal: list[tuple[int, int]] = []
        length = end = whole = 0
        # `literal` gets the ranges in the text with names, which differ in length from the placeholders.
        for match in self._placeholder.finditer(rendered):
            name = self._name(int(match[1]))
            before = rendered[end : match.start()]
            length += len(before) + len(name)
            parts += (before, name)
            literal.append((length - len(name), length))
            end, whole = match.end(), whole + 1
        # A placeholder that was cut or changed to upper case may still have this part of the nonce.
        if rendered.lower().count(self._nonce[1:9]) != whole:
            raise GuessedMarkError
        return PromptText("".join((*parts, rendered[end:])), tuple(literal))

    def is_changed(self, message: ChatMessage, rendered: str) -> bool:
        """Return whether the template has changed a message's text, so that the prompt `rendered` does not contain it.

        If a template removes text, two halves of a special token's name may be joined. In an assistant message it
        removes only the reasoning at the beginning, which joins nothing, so such a message always counts as unchanged.

        `message`: the message with placeholders, as the template got it.
        """
        return message.role != "assistant" and message.content.strip() not in rendered

    def _message(self, message: ChatMessage, is_changed: bool) -> ChatMessage:
        shield = self._every_beginning if is_changed else self._shielded
        calls = (
            replace(
                call,
                id=self._shielded(call.id),
                name=self._shielded(call.name),
                arguments=self._shielded_json(call.arguments),
            )
            for call in message.calls
        )
        return replace(
            message,
            content=shield(message.content),
            reasoning=self._shielded(message.reasoning),
            calls=tuple(calls),
            call_id=self._shielded(message.call_id),
            name=self._shielded(message.name),
        )

    def _shielded(self, text: str) -> str:
        return self._replaced(text, self._special.names)

    def _shielded_json(self, text: str) -> str:
        r"""Return JSON text with placeholders for names of special tokens in its strings.

        JSON escapes may hide a name, as in `\u003c|im_end|>`, and the template renderer decodes them. So names are
        searched in the decoded strings. The name `<|"|>` always has an escape in JSON, because it contains a quote.
        """
        if "\\" not in text:
            return self._shielded(text)
        try:
            value = json.loads(text)
            known = len(self._names)
            shielded = self._shielded_value(value)
            # ASCII: a lone surrogate that was written with escapes could not be sent.
            return self._shielded(text) if len(self._names) == known else json.dumps(shielded)
        except RecursionError:
            # The renderer may read deeper. Without its escapes no name comes out of it.
            return self._shielded(text.replace("\\", "\\\\"))
        except ValueError:
            return self._shielded(text)  # the renderer cannot read it either

    def _shielded_value(self, value: Any) -> Any:
        if isinstance(value, str):
            return self._shielded(value)
        if isinstance(value, list):
            return [self._shielded_value(each) for each in value]
        if isinstance(value, dict):
            return {self._shielded(key): self._shielded_value(each) for key, each in value.items()}
        return value

    def _every_beginning(self, text: str) -> str:
        return self._replaced(text, self._special.beginnings)

    def _replaced(self, text: str, pattern: re.Pattern[str] | None) -> str:
        return pattern.sub(self._hide, text) if pattern is not None and text else text

    def _hide(self, match: re.Match[str]) -> str:
        self._names.append(match[0])
        return f"{self._nonce}{len(self._names) - 1}z"

    def _name(self, number: int) -> str:
        if number >= len(self._names):
            raise GuessedMarkError
        return self._names[number]


def render_shielded(
    special: SpecialTokens,
    messages: Sequence[ChatMessage],
    template_input: TemplateInput,
    render: Callable[[Sequence[ChatMessage], TemplateInput], str],
) -> PromptText:
    """Return the rendered prompt of a conversation, in which names of special tokens in messages are plain text.

    `render`: renders messages and template input to the prompt's text.

    Raises:
        GuessedMarkError: the template changes the text so that it cannot be distinguished from markup.
    """
    shield = Shield(special)
    shielded = shield.messages(messages)
    rendered = render(shielded, shield.template_input(template_input))
    changed = [shield.is_changed(each, rendered) for each in shielded]
    if any(changed):
        shield = Shield(special)
        rendered = render(shield.messages(messages, changed=changed), shield.template_input(template_input))
    return shield.prompt(rendered)


def tokenize_prompt(loaded: LoadedContext, prompt: PromptText, *, add_special: bool) -> list[int]:
    """Return the tokens of a prompt. Names of special tokens in its literal parts are tokenised as plain text.

    `add_special`: whether to add BOS and EOS if the vocabulary requires them.
    """
    if not prompt.literal:
        return tokenize(loaded, prompt.text, add_special=add_special)
    # Asked with an empty text, because some tokenizers add others than BOS and EOS, or none (SEP of WPM; RWKV).
    added = tokenize(loaded, "", add_special=add_special)
    n_before = 1 if loaded.engine.low.llama_vocab_get_add_bos(loaded.vocabulary) else 0
    tokens = added[:n_before]
    special = loaded.special_tokens
    start, strips = 0, False
    for match in chain(_markup(special, prompt), (None,)):
        fragment = prompt.text[start : match.start() if match else None]
        token = special.by_name[match[0]] if match else None
        if strips:
            fragment = fragment.lstrip(_SPACES)
        if token is not None and token.strips_left:
            fragment = fragment.rstrip(_SPACES)
        if fragment:
            tokens += tokenize(loaded, fragment, add_special=False, parse_special=False)
        if match is not None and token is not None:
            tokens.append(token.id)
            start, strips = match.end(), token.strips_right
    return tokens + added[n_before:]


def _markup(special: SpecialTokens, prompt: PromptText) -> list[re.Match[str]]:
    """Return the matches of names of special tokens that are markup: those outside of `prompt.literal`, in order."""
    found: list[re.Match[str]] = []
    index, part = 0, 0
    while special.names is not None and (match := special.names.search(prompt.text, index)) is not None:
        while part < len(prompt.literal) and prompt.literal[part][1] <= match.start():
            part += 1
        # A match that reaches into a literal part is no markup, but a later one may begin inside it.
        if part < len(prompt.literal) and prompt.literal[part][0] < match.end():
            index = match.start() + 1
            continue
        found.append(match)
        index = match.end()
    return found

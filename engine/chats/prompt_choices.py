"""Which tokens of a prompt are those of earlier answers whose choices were kept.

A prompt is cut into tokens anew, so that an answer in it need not have the tokens that it was written with: those that
begin at the same place and say the same are taken for the same.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate

from engine.chats.asking import message_text
from engine.chats.message import Message
from engine.protocol.messages import TokenChoice

HEAD_CHARACTERS = 32
"""By so many of its first characters a message is found, behind the one before it."""


def choices_in_prompt(pieces: Sequence[str], shown: Sequence[Message]) -> Mapping[int, TokenChoice]:
    """Return how tokens of a prompt were chosen, by their places. `shown`: the messages that it was made of."""
    text = "".join(pieces)
    begins = zip(pieces, accumulate(map(len, pieces), initial=0), strict=False)
    numbers = {begin: number for number, (piece, begin) in enumerate(begins) if piece}
    found: dict[int, TokenChoice] = {}
    behind = 0
    for message in shown:
        choices = _of_content(message)
        words = "".join(choice.text for choice in choices) or message_text(message)
        head = words.strip()[: min(HEAD_CHARACTERS, len(message_text(message).strip()))]
        begin = text.find(head, behind) if head else -1
        if begin < 0:
            continue
        behind = begin + len(head)
        # a template may leave out spaces around an answer
        place = begin - (len(words) - len(words.lstrip()))
        for choice in choices:
            if place >= begin and not text.startswith(choice.text, place):
                break
            number = numbers.get(place, -1)
            if number >= 0 and pieces[number] == choice.text:
                found[number] = choice
            place += len(choice.text)
    return found


def _of_content(message: Message) -> tuple[TokenChoice, ...]:
    """Return the choices of an answer's words: thoughts come before them, and are in no prompt."""
    if not message.reasoning:
        return message.choices
    text = "".join(choice.text for choice in message.choices)
    begin = text.find(message.content.strip()[:HEAD_CHARACTERS], len(message.reasoning))
    if begin < 0:
        return ()
    ends = accumulate(len(choice.text) for choice in message.choices)
    return tuple(choice for choice, end in zip(message.choices, ends, strict=True) if end > begin)

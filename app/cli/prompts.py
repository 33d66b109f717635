"""The prompts of `load`, and what their answers come to together."""

from __future__ import annotations

import time
from argparse import Namespace
from pathlib import Path

import msgspec

from engine.errors import ArgumentError
from engine.files import read_at_most
from engine.json_file import UNREADABLE
from engine.session.events import Cancelled, Crashed, Done, Failed, Loaded, OutOfMemory

_MAX_BYTES = 64 * 1024 * 1024

AnswerEnding = Done | OutOfMemory | Failed | Crashed | Cancelled
Ending = AnswerEnding | Loaded


def prompts_of(options: Namespace) -> tuple[str, ...]:
    """Return the prompt, or those of the file, that a command line names.

    Raises:
        ArgumentError: for both at once, for a file that holds no list of texts, and for what is not UTF-8.
    """
    if options.prompts is not None:
        if options.prompt is not None:
            raise ArgumentError("--prompt gives one text and --prompts a file of them; leave one of them out.")
        return _read(options.prompts)
    if options.prompt is None:
        return ()
    check_text(options.prompt, "The prompt")
    return (options.prompt,)


def check_text(text: str, what: str) -> None:
    """Refuse what a command line has that is no text.

    Raises:
        ArgumentError: for what is not UTF-8.
    """
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ArgumentError(f"{what} is not UTF-8 text; give it in UTF-8.") from None


class Answers:
    """How the answers to several prompts have ended, and how long they took together."""

    def __init__(self) -> None:
        self._endings: list[AnswerEnding] = []
        self._begun_s = 0.0

    def begin(self) -> None:
        """The prompts are about to be asked."""
        self._begun_s = time.perf_counter()

    def add(self, ending: AnswerEnding) -> None:
        """One of them has ended."""
        self._endings.append(ending)

    def summary(self) -> Ending:
        """Return the end of all: the first that is not good, else their sums, with speeds over the whole time."""
        seconds = max(time.perf_counter() - self._begun_s, 1e-9)
        bad = next((each for each in self._endings if not isinstance(each, Done)), None)
        if bad is not None:
            return msgspec.structs.replace(bad, request=None)
        done = [each for each in self._endings if isinstance(each, Done)]
        prompt_tokens = sum(each.prompt_tokens for each in done)
        generated_tokens = sum(each.generated_tokens for each in done)
        return Done(
            prompt_tokens=prompt_tokens,
            generated_tokens=generated_tokens,
            prompt_tokens_per_second=prompt_tokens / seconds,
            generation_tokens_per_second=generated_tokens / seconds,
            stop_reason=done[-1].stop_reason,
        )


def _read(path: Path) -> tuple[str, ...]:
    try:
        data = read_at_most(path, _MAX_BYTES)
    except (OSError, ValueError) as error:
        raise ArgumentError(f"--prompts: {path} cannot be read: {error}.") from None
    try:
        prompts = msgspec.json.decode(data, type=tuple[str, ...])
    except UNREADABLE as error:
        raise ArgumentError(f"--prompts: {path} is not a JSON list of texts: {error}.") from None
    if not prompts:
        raise ArgumentError(f"--prompts: {path} holds no prompt; give a JSON list of texts.")
    return prompts

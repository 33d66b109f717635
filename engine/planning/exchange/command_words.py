"""Words and variables of a typed command. The text is untrusted, so the number of words is limited."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Sequence

from engine.base.errors import LayoutError
from engine.base.language import tr

MAX_WORDS = 4096
VARIABLE = re.compile(r"([A-Za-z_][A-Za-z0-9_]*)=(.*)", re.ASCII | re.DOTALL)
CONTAINER_OPTIONS = frozenset({"-e", "--env"})
"""Options of `docker run` and `podman run` that set a variable."""
COMMAND_ENDS = frozenset({";", "&&", "||", "|", "&", ">", ">>", "2>&1"})
"""Words that end a command of a shell."""
_JOINED_VARIABLE = re.compile(r"(?:--env=|-e=?)(?=[A-Za-z_]\w*=)", re.ASCII)
"""Beginning of a word that is an option of `CONTAINER_OPTIONS` and its variable together."""
_CONTINUED = re.compile(r"[\\^`]\r?\n")
_POWERSHELL_VARIABLE = re.compile(r"\$env:(\w+)[ \t]*=[ \t]*", re.ASCII | re.IGNORECASE)
_WINDOWS_PATH = re.compile(r"(?:^|[\s=])[\"']?(?:[A-Za-z]:|\.{1,2})\\\w", re.ASCII)
_QUOTE = "\0"
"""Stands for an escaped quotation mark while a command of Windows is split into words."""


def split_words(text: str) -> list[str]:
    """Split the text of a POSIX or Windows command into words. Comments and quotation marks are removed.

    Raises:
        LayoutError: there are unclosed quotes, or too many words.
    """
    lines = (line for line in _CONTINUED.sub(" ", text).splitlines() if not line.lstrip().startswith("#"))
    plain = _POWERSHELL_VARIABLE.sub(r"\1=", "\n".join(lines))
    if is_windows := _WINDOWS_PATH.search(plain) is not None:
        # The only thing that a backslash escapes in a command of Windows (`CommandLineToArgvW`).
        plain = plain.replace('\\"', _QUOTE)
    lexer = shlex.shlex(plain, posix=True, punctuation_chars=False)
    lexer.whitespace_split, lexer.commenters = True, ""
    if is_windows:
        # A backslash is part of a path.
        lexer.escape = ""
    try:
        words = [word.replace(_QUOTE, '"') for word in lexer]
    except ValueError:
        raise LayoutError(
            tr("the command has a quotation mark that is not closed, or a backslash at its end")
        ) from None
    words = [part for word in words for part in _parts(word)]
    if len(words) > MAX_WORDS:
        raise LayoutError(
            tr("the command has {count} words; at most {most} are read", count=len(words), most=MAX_WORDS)
        )
    return words


def _parts(word: str) -> tuple[str, ...]:
    """Split `;` or `&&` from the end of a word, and `--env=NAME=VALUE` into `-e` and `NAME=VALUE`.

    Any other word is returned unchanged, as the only part.
    """
    for end in (";", "&&"):
        if word.endswith(end) and word != end:
            return word.removesuffix(end), end
    if joined := _JOINED_VARIABLE.match(word):
        return "-e", word[joined.end() :]
    return (word,)


def find_variables(words: Sequence[str], start: int) -> Iterator[str]:
    """Yield the words of a text that set environment variables for a program (`NAME=VALUE`).

    Such words are looked for in three places: before the program's name, between the name and the first option, and
    after `-e` or `--env`, options of containers. The search ends where the program's command ends.

    `start`: index of the first word after the program's name.
    """
    has_options = False
    for index, (before, word) in enumerate(zip(["", *words], words, strict=False)):
        if word in COMMAND_ENDS:
            if index >= start:
                return
            has_options = False
        elif word.startswith("-"):
            has_options = True
        elif VARIABLE.fullmatch(word) and (index < start or not has_options or before in CONTAINER_OPTIONS):
            yield word

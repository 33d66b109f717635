"""Answers that obey a grammar, or a JSON schema, which is made a grammar first.

As llama.cpp's own sampling does: a token is chosen without the grammar, and only if that does not obey it are all
tokens put to the grammar, which takes long. A token that the grammar refuses must not reach it: that aborts the engine.
The engine's reader of grammars recurses for each bracket and writes out each repetition: `fault_of` refuses what would
break it. What takes long all the same is ended by `StepLimit`.
"""

from __future__ import annotations

import ctypes
import re
from collections.abc import Callable
from typing import Any

from engine.planning.settings.sampling_settings import SamplingSettings
from engine.runtime.child.load.loaded_context import LoadedContext
from engine.runtime.child.native.failures import StepLimit, failure

MAX_DEPTH = 3000
"""Brackets within brackets: the reader's stack has room for some 20,000."""
MAX_ELEMENTS = 200_000
"""Characters, classes and names with all repetitions written out, as the reader does it."""
_TOKENS = re.compile(
    r"""(?P<skipped>\#[^\n]*|\s+)
    |(?P<literal>"(?:\\.|[^"\\])*"?|\[(?:\\.|[^\]\\])*\]?)
    |(?P<count>\{\s*(?P<least>\d*)\s*(?P<comma>,?)\s*(?P<most>\d*)\s*\}?)
    |(?P<word>[\w-]+)
    |(?P<other>.)""",
    re.ASCII | re.DOTALL | re.VERBOSE,
)
_MAX_DIGITS = 6


def fault_of(grammar: str) -> str:
    """Return why the engine cannot be given this grammar, empty where nothing speaks against it."""
    sums, last = [0], 0
    for token in _TOKENS.finditer(grammar):
        match token.lastgroup, token[0]:
            case "skipped", _:
                continue
            case "other", "(":
                sums.append(0)
                last = 0
            case "other", ")" if len(sums) > 1:
                last = sums.pop()
                sums[-1] += last
            case "count", _:
                least, most = token["least"], token["most"] if token["comma"] else token["least"]
                if max(len(least), len(most)) > _MAX_DIGITS:
                    return "it repeats something too often"
                if least and most and int(least) > int(most):
                    return f"{token[0][:40]} asks for more than it allows"
                times = max(1, int(least or 0), int(most or 0))
                sums[-1] += last * (times - 1)
                last *= times
            case _:
                last = len(token[0])
                sums[-1] += last
        if len(sums) > MAX_DEPTH:
            return "its brackets are nested too deeply"
        if sums[-1] > MAX_ELEMENTS:
            return "written out it is too long"
    return ""


MAX_GRAMMAR_CHARACTERS = 1 << 16
MAX_SCHEMA_CHARACTERS = 1 << 15
MAX_CONVERTED_CHARACTERS = 1 << 18
MAX_COUNT = 2000
"""Of characters or entries in a schema: each of them becomes a bracket of the grammar."""
_COUNT = re.compile(r'(?:"(?:min|max)(?:Items|Length)"\s*:\s*(\d+)|\{\s*(?:\d+\s*,\s*)?(\d{5,}))')
_REFUSED = float("-inf")
_ENTRY_NUMBERS = 3
"""Token, logit and probability of a `llama_token_data`, each of four bytes."""


def grammar_text(settings: SamplingSettings, say: Callable[[str], None]) -> str:
    """Return the grammar that an answer is to obey, empty for none; `say` as of `StepLimit`.

    Raises:
        EndOfRequest: with a `Failure`: both are given, one is too long, or the schema cannot be used.
    """
    if settings.grammar and settings.json_schema:
        raise failure("argument", "A grammar and a JSON schema are set; an answer obeys one of them. Empty the other.")
    if len(settings.grammar) > MAX_GRAMMAR_CHARACTERS or len(settings.json_schema) > MAX_SCHEMA_CHARACTERS:
        raise failure("argument", "The grammar or JSON schema is too long to be one; shorten it.")
    if not settings.json_schema.strip():
        if fault := fault_of(settings.grammar):
            raise failure("argument", f"The grammar cannot be used ({fault}); correct it or empty it.")
        return settings.grammar if settings.grammar.strip() else ""
    text = _converted(settings.json_schema, say)
    if fault := "it grows too long" if len(text) > MAX_CONVERTED_CHARACTERS else fault_of(text):
        raise failure("argument", f"The JSON schema cannot be used: as a grammar {fault}. Make it simpler or empty it.")
    return text


def _converted(schema: str, say: Callable[[str], None]) -> str:
    if any(len(count) > 9 or int(count) > MAX_COUNT for counts in _COUNT.findall(schema) for count in counts if count):
        raise failure(
            "argument", f"The JSON schema counts to more than {MAX_COUNT}, which no answer does; lower it or empty it."
        )
    # imported with the first schema
    from llama_cpp.llama_grammar import json_schema_to_gbnf

    step = StepLimit(say, "the JSON schema")
    try:
        with step:
            return str(json_schema_to_gbnf(schema))
    except RecursionError:
        raise failure("argument", "The JSON schema is nested too deeply; make it simpler.") from None
    except Exception as error:
        # whatever a foreign schema has wrong is that schema's error
        reason = " ".join(str(error).split())[:200] or type(error).__name__
        raise failure("argument", f"The JSON schema cannot be used: {reason}. Correct it or empty it.") from None
    finally:
        step.close()


class Grammar:
    """The grammar of one request. To be freed."""

    def __init__(self, loaded: LoadedContext, text: str) -> None:
        self._low = loaded.engine.low
        self._loaded = loaded
        loaded.log.begin_computation(lambda _failed: None)
        self._step = StepLimit(loaded.engine.say_last_word, "the grammar or JSON schema")
        with self._step:
            self._sampler = self._low.llama_sampler_init_grammar(
                loaded.vocabulary, text.encode("utf-8", "replace"), b"root"
            )
        if not self._sampler:
            self._step.close()
            reason = loaded.log.facts.reason()
            raise failure(
                "argument",
                f"The grammar cannot be used{f' ({reason})' if reason else ''}. It has to be GBNF with a rule root;"
                " correct it or empty it.",
            )
        size = loaded.vocabulary_size
        self._entries = (self._low.llama_token_data * size)()
        numbers = memoryview(self._entries).cast("B").cast("i")
        numbers[0::_ENTRY_NUMBERS] = memoryview((ctypes.c_int * size)(*range(size))).cast("B").cast("i")
        self._fresh = bytes(numbers)

    def free(self) -> None:
        self._step.close()
        self._low.llama_sampler_free(self._sampler)

    def sample(self, chain: Any, place: int) -> int:
        """Choose a token by a chain, as the grammar allows; chain and grammar take note of it."""
        with self._step:
            return self._sampled(chain, place)

    def _sampled(self, chain: Any, place: int) -> int:
        candidates = self._candidates(place)
        token = self._chosen(chain, candidates)
        if not self._allows(token):
            candidates = self._candidates(place)
            self._low.llama_sampler_apply(self._sampler, ctypes.byref(candidates))
            if max(memoryview(self._entries).cast("B").cast("f")[1::_ENTRY_NUMBERS]) == _REFUSED:
                raise failure("argument", "Nothing that this model can write goes on as the grammar wants it.")
            token = self._chosen(chain, candidates)
            if not self._allows(token):
                raise failure("argument", "The samplers leave no token that the grammar allows; loosen either.")
        self._low.llama_sampler_accept(self._sampler, token)
        self._low.llama_sampler_accept(chain, token)
        return token

    def _candidates(self, place: int) -> Any:
        """Return all tokens with their logits."""
        size = self._loaded.vocabulary_size
        logits = self._low.llama_get_logits_ith(self._loaded.context, place)
        given = (ctypes.c_float * size).from_address(ctypes.addressof(logits.contents))
        ctypes.memmove(self._entries, self._fresh, len(self._fresh))
        memoryview(self._entries).cast("B").cast("f")[1::_ENTRY_NUMBERS] = memoryview(given).cast("B").cast("f")
        entries = ctypes.cast(self._entries, self._low.llama_token_data_p)
        return self._low.llama_token_data_array(entries, size, -1, False)

    def _chosen(self, chain: Any, candidates: Any) -> int:
        self._low.llama_sampler_apply(chain, ctypes.byref(candidates))
        return int(candidates.data[max(0, candidates.selected)].id)

    def _allows(self, token: int) -> bool:
        entry = (self._low.llama_token_data * 1)((token, 1.0, 0.0))
        single = self._low.llama_token_data_array(ctypes.cast(entry, self._low.llama_token_data_p), 1, -1, False)
        self._low.llama_sampler_apply(self._sampler, ctypes.byref(single))
        return bool(entry[0].logit != _REFUSED)

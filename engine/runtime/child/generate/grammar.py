"""Sampling with a grammar (GBNF), or with a JSON schema, which is converted to a grammar first.

As in llama.cpp's `common_sampler_sample`, a token is sampled without the grammar, and then checked. Only if the grammar
refuses the token, the grammar filters all tokens, which is slow. `llama_sampler_accept` aborts the process on a refused
token, so each token is checked before it is accepted.

llama.cpp's grammar parser recurses for each bracket and expands each repetition. `grammar_error` refuses grammars that
would overflow its stack or memory, and `StepLimit` ends the process if parsing is slow nevertheless.
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
"""Deepest nesting of brackets in a grammar. The stack of llama.cpp's parser has room for some 20,000."""
MAX_ELEMENTS = 200_000
"""Largest number of characters, character classes and rule names in a grammar whose repetitions are expanded."""
_TOKENS = re.compile(
    r"""(?P<skipped>\#[^\n]*|\s+)
    |(?P<literal>"(?:\\.|[^"\\])*"?|\[(?:\\.|[^\]\\])*\]?)
    |(?P<count>\{\s*(?P<least>\d*)\s*(?P<comma>,?)\s*(?P<most>\d*)\s*\}?)
    |(?P<word>[\w-]+)
    |(?P<other>.)""",
    re.ASCII | re.DOTALL | re.VERBOSE,
)
_MAX_DIGITS = 6


def grammar_error(grammar: str) -> str:
    """Return why a grammar must not be passed to llama.cpp's parser; empty if it is harmless. Syntax is not checked."""
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
                    return "it has too many repetitions"
                if least and most and int(least) > int(most):
                    return f"{token[0][:40]} has a minimum above its maximum"
                times = max(1, int(least or 0), int(most or 0))
                sums[-1] += last * (times - 1)
                last *= times
            case _:
                last = len(token[0])
                sums[-1] += last
        if len(sums) > MAX_DEPTH:
            return "its brackets are nested too deeply"
        if sums[-1] > MAX_ELEMENTS:
            return "it is too long when its repetitions are expanded"
    return ""


MAX_GRAMMAR_CHARACTERS = 1 << 16
MAX_SCHEMA_CHARACTERS = 1 << 15
MAX_CONVERTED_CHARACTERS = 1 << 18
MAX_COUNT = 2000
"""Largest minItems, maxItems, minLength and maxLength in a schema.

The converter nests one bracket of the grammar for each optional item or character.
"""
_COUNT = re.compile(r'(?:"(?:min|max)(?:Items|Length)"\s*:\s*(\d+)|\{\s*(?:\d+\s*,\s*)?(\d{5,}))')
_REFUSED = float("-inf")
_ENTRY_NUMBERS = 3
"""Number of fields of a `llama_token_data`: token, logit and probability, each of four bytes."""


def grammar_text(settings: SamplingSettings, send_reason: Callable[[str], None]) -> str:
    """Return the grammar (GBNF) for an answer; empty if the settings have neither a grammar nor a schema.

    `send_reason`: called with a sentence before the process ends because the conversion exceeded a limit (`StepLimit`).

    Raises:
        RequestError: the settings have both a grammar and a schema, or one that is too long or invalid.
    """
    if settings.grammar and settings.json_schema:
        raise failure(
            "argument", "A grammar and a JSON schema are set, but only one of them can be used. Clear the other one."
        )
    if len(settings.grammar) > MAX_GRAMMAR_CHARACTERS or len(settings.json_schema) > MAX_SCHEMA_CHARACTERS:
        raise failure("argument", "The grammar or JSON schema is too long; shorten it.")
    if not settings.json_schema.strip():
        if fault := grammar_error(settings.grammar):
            raise failure("argument", f"The grammar cannot be used ({fault}); correct or clear it.")
        return settings.grammar if settings.grammar.strip() else ""
    text = _converted(settings.json_schema, send_reason)
    if fault := "it becomes too long" if len(text) > MAX_CONVERTED_CHARACTERS else grammar_error(text):
        raise failure("argument", f"The JSON schema cannot be used: as a grammar {fault}. Simplify or clear it.")
    return text


def _converted(schema: str, send_reason: Callable[[str], None]) -> str:
    if any(len(count) > 9 or int(count) > MAX_COUNT for counts in _COUNT.findall(schema) for count in counts if count):
        raise failure(
            "argument",
            f"The JSON schema has a count above {MAX_COUNT}, which no answer reaches; lower the count, or "
            "clear the schema.",
        )
    # Imported with the first schema: most children never need it.
    from llama_cpp.llama_grammar import json_schema_to_gbnf

    try:
        with StepLimit(send_reason, "the JSON schema"):
            return str(json_schema_to_gbnf(schema))
    except RecursionError:
        raise failure("argument", "The JSON schema is nested too deeply; make it simpler.") from None
    except Exception as error:
        # The converter raises all kinds of errors on invalid schemas.
        reason = " ".join(str(error).split())[:200] or type(error).__name__
        raise failure("argument", f"The JSON schema cannot be used: {reason}. Correct or clear it.") from None


class Grammar:
    """The grammar sampler of one request. Call `free` when the request ends. `text`: the grammar, in GBNF."""

    def __init__(self, loaded: LoadedContext, text: str) -> None:
        self._low = loaded.engine.low
        self._loaded = loaded
        loaded.log.begin_computation(lambda _failed: None)
        self._step = StepLimit(loaded.engine.send_abort_text, "the grammar or JSON schema")
        with self._step:
            self._sampler = self._low.llama_sampler_init_grammar(
                loaded.vocabulary, text.encode("utf-8", "replace"), b"root"
            )
        if not self._sampler:
            reason = loaded.log.facts.reason()
            raise failure(
                "argument",
                f"The grammar cannot be used{f' ({reason})' if reason else ''}. It must be GBNF with a rule named root;"
                " correct or clear it.",
            )
        # The array of candidates is filled through memoryviews: a Python loop over 150,000 tokens would take longer
        # than the computation of a token.
        size = loaded.vocabulary_size
        self._entries = (self._low.llama_token_data * size)()
        numbers = memoryview(self._entries).cast("B").cast("i")
        numbers[0::_ENTRY_NUMBERS] = memoryview((ctypes.c_int * size)(*range(size))).cast("B").cast("i")
        self._fresh = bytes(numbers)

    def free(self) -> None:
        self._low.llama_sampler_free(self._sampler)

    def sample(self, chain: Any, index: int) -> int:
        """Sample a token that the grammar allows, and pass it to the sampler chain and the grammar
        (`llama_sampler_accept`).

        `chain`: the sampler chain of the request.
        `index`: index of the logits in the last batch.
        """
        with self._step:
            return self._sampled(chain, index)

    def _sampled(self, chain: Any, index: int) -> int:
        candidates = self._candidates(index)
        token = self._chosen(chain, candidates)
        if not self._allows(token):
            # Read anew: the sampler chain has sorted and cut the first array.
            candidates = self._candidates(index)
            self._low.llama_sampler_apply(self._sampler, ctypes.byref(candidates))
            if max(memoryview(self._entries).cast("B").cast("f")[1::_ENTRY_NUMBERS]) == _REFUSED:
                raise failure("argument", "No token of this model continues the answer as the grammar requires.")
            token = self._chosen(chain, candidates)
            if not self._allows(token):
                raise failure(
                    "argument",
                    "The samplers leave no token that the grammar allows; relax the samplers or the grammar.",
                )
        self._low.llama_sampler_accept(self._sampler, token)
        self._low.llama_sampler_accept(chain, token)
        return token

    def _candidates(self, index: int) -> Any:
        """Return a `llama_token_data_array` of all tokens with their logits. `index`: index of the logits in the last
        batch.
        """
        size = self._loaded.vocabulary_size
        logits = self._low.llama_get_logits_ith(self._loaded.context, index)
        given = (ctypes.c_float * size).from_address(ctypes.addressof(logits.contents))
        ctypes.memmove(self._entries, self._fresh, len(self._fresh))
        memoryview(self._entries).cast("B").cast("f")[1::_ENTRY_NUMBERS] = memoryview(given).cast("B").cast("f")
        entries = ctypes.cast(self._entries, self._low.llama_token_data_p)
        return self._low.llama_token_data_array(entries, size, -1, False)

    def _chosen(self, chain: Any, candidates: Any) -> int:
        self._low.llama_sampler_apply(chain, ctypes.byref(candidates))
        return int(candidates.data[max(0, candidates.selected)].id)

    def _allows(self, token: int) -> bool:
        # As common_sampler_sample does: the grammar sampler sets the logit of a refused token to minus infinity.
        entry = (self._low.llama_token_data * 1)((token, 1.0, 0.0))
        single = self._low.llama_token_data_array(ctypes.cast(entry, self._low.llama_token_data_p), 1, -1, False)
        self._low.llama_sampler_apply(self._sampler, ctypes.byref(single))
        return bool(entry[0].logit != _REFUSED)

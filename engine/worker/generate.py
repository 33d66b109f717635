"""Generating: the prompt in batches, then token by token, with the cache of the turn before reused."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from engine.runner.protocol import AllocationFailure, Answer, Generate, Generated, Piece, Reading
from engine.worker.chat_template import TemplateError, render_chat, render_plain_chat
from engine.worker.diagnosis import FreeMemory, allocation_failure, decode_failure
from engine.worker.outcome import EndOfRequest, failure
from engine.worker.sampling import SamplerChain
from engine.worker.session import ABORTED, DECODED, NO_SLOT, Session
from engine.worker.stop import StopRequest
from engine.worker.text import PieceDecoder, token_text, tokenize

FIRST_PROMPT_BATCH = 32
"""Prompt tokens before the first look at the stop request: few, since a layout on the CPU may do one a second."""
PROMPT_BATCH_SECONDS = 0.5
"""Later batches are what can be computed in this time: several micro batches at once keep several devices busy."""

StopReason = Literal["end_of_text", "length", "context_full", "stopped"]


@dataclass(slots=True)
class _Counts:
    """What is reported at the end; times in seconds."""

    prompt_tokens: int
    cached_tokens: int = 0
    evaluated_tokens: int = 0
    generated_tokens: int = 0
    prompt_seconds: float = 0.0
    generation_seconds: float = 0.0


class Generator:
    """One generation on a session. `say` is given what is told before the last word."""

    def __init__(self, session: Session, stop: StopRequest, say: Callable[[Answer], None]) -> None:
        self._session = session
        self._stop = stop
        self._say = say
        self._reading = Reading(request=0, read_tokens=0, prompt_tokens=0)

    def run(self, request: Generate) -> Generated:
        """Generate, and return how it went.

        Raises:
            EndOfRequest: with a `Failure` or an `AllocationFailure`; the model stays loaded.
        """
        if not self._session.makes_text:
            raise failure("argument", "This model does not continue text; chat needs a model that generates.")
        prompt = self._prompt(request)
        self._reading = Reading(request=request.id, read_tokens=0, prompt_tokens=len(prompt))
        counts = _Counts(prompt_tokens=len(prompt))
        started = time.perf_counter()
        complete = self._read_prompt(prompt, counts)
        begun = time.perf_counter()
        counts.prompt_seconds = begun - started
        reason: StopReason = self._continue(request, counts) if complete else "stopped"
        if complete:
            counts.generation_seconds = time.perf_counter() - begun
        return Generated(
            request=request.id,
            prompt_tokens=counts.prompt_tokens,
            cached_tokens=counts.cached_tokens,
            evaluated_tokens=counts.evaluated_tokens,
            generated_tokens=counts.generated_tokens,
            prompt_seconds=counts.prompt_seconds,
            generation_seconds=counts.generation_seconds,
            context_used=len(self._session.tokens),
            stop_reason=reason,
        )

    def tell_reading(self) -> None:
        """Say how far the prompt is: a long one on a slow machine is not stuck."""
        self._say(self._reading)

    def _prompt(self, request: Generate) -> list[int]:
        text = prompt_text(self._session, request)
        begin = token_text(self._session, self._session.engine.low.llama_vocab_bos(self._session.vocabulary))
        # a template that writes the first token itself must not get a second one
        tokens = tokenize(self._session, text, add_special=not (begin and text.startswith(begin)))
        room = self._session.context_tokens
        if not tokens:
            raise failure("argument", "The prompt is empty; write something.")
        if len(tokens) >= room:
            raise failure(
                "argument",
                f"The conversation takes {len(tokens)} tokens and the context holds {room}, one of them for the answer."
                " Shorten or clear the conversation, or load with a longer context.",
            )
        return tokens

    def _read_prompt(self, prompt: list[int], counts: _Counts) -> bool:
        """Decode what the cache does not hold yet; False when stopped before the end."""
        session = self._session
        kept = counts.cached_tokens = keep_common_prefix(session, prompt)
        limit = max(1, min(session.settings.n_batch, session.context_tokens))
        step = min(FIRST_PROMPT_BATCH, limit)
        position = kept
        while position < len(prompt):
            started = time.perf_counter()
            if self._stop.requested or not self._decode(batch := prompt[position : position + step]):
                return False
            position += len(batch)
            counts.evaluated_tokens = position - kept
            self._reading = Reading(
                request=self._reading.request, read_tokens=position, prompt_tokens=counts.prompt_tokens
            )
            self.tell_reading()
            rate = len(batch) / max(time.perf_counter() - started, 1e-9)
            step = min(limit, max(FIRST_PROMPT_BATCH, int(rate * PROMPT_BATCH_SECONDS)))
        return True

    def _continue(self, request: Generate, counts: _Counts) -> StopReason:
        session, low = self._session, self._session.engine.low
        vocabulary, room = session.vocabulary, session.context_tokens
        pieces = PieceDecoder(session)
        reason: StopReason = "length"
        with SamplerChain(session.engine, request) as sampler:
            while request.max_tokens is None or counts.generated_tokens < request.max_tokens:
                if self._stop.requested:
                    reason = "stopped"
                    break
                token = sampler.sample(session.context)
                if low.llama_vocab_is_eog(vocabulary, token):
                    reason = "end_of_text"
                    break
                counts.generated_tokens += 1
                if text := pieces.add(token):
                    self._say(Piece(request=request.id, text=text))
                if len(session.tokens) >= room:
                    reason = "context_full"
                    break
                if counts.generated_tokens == request.max_tokens:
                    break
                if not self._decode([token]):
                    reason = "stopped"
                    break
        if text := pieces.rest():
            self._say(Piece(request=request.id, text=text))
        return reason

    def _decode(self, tokens: list[int]) -> bool:
        """Append tokens to the context; False when the parent's stop ended the computation."""
        session = self._session
        session.log.facts.failed.clear()
        session.log.facts.errors.clear()
        free = FreeMemory(session.devices)
        session.log.on_failed = free.note
        status = session.decode(tokens)
        if status == DECODED:
            return True
        if status == ABORTED and self._stop.requested:
            return False
        if status == NO_SLOT:
            raise failure("argument", "The context is full. Clear the conversation or load with a longer context.")
        refused = self._refused(free)
        raise EndOfRequest(refused or decode_failure(status, session.log.facts))

    def _refused(self, free: FreeMemory) -> AllocationFailure | None:
        session = self._session
        return allocation_failure(session.devices, session.log.facts, free, "context", session.parts())


def prompt_text(session: Session, request: Generate) -> str:
    """Return the text to continue: the raw prompt, or the conversation by the model's template."""
    if not request.messages:
        return request.prompt
    low = session.engine.low
    template = low.llama_model_chat_template(session.model, None)
    if template:
        try:
            return render_chat(
                template.decode("utf-8", "replace"),
                request.messages,
                beginning_of_text=token_text(session, low.llama_vocab_bos(session.vocabulary)),
                end_of_text=token_text(session, low.llama_vocab_eos(session.vocabulary)),
            )
        except TemplateError as error:
            print(f"The model's chat template is not used: {error}.", file=sys.stderr, flush=True)
    return render_plain_chat(request.messages)


def keep_common_prefix(session: Session, prompt: list[int]) -> int:
    """Cut the cache back to what it has in common with `prompt` and return how many tokens that is.

    At least one token of the prompt is left to decode: its logits begin the answer.
    """
    kept = 0
    for cached, wanted in zip(session.tokens, prompt[:-1], strict=False):
        if cached != wanted:
            break
        kept += 1
    if kept == len(session.tokens):
        return kept
    if kept == 0 or not _holds_window(session, kept) or not _cut(session, kept):
        session.clear()
        return 0
    del session.tokens[kept:]
    return kept


def _holds_window(session: Session, kept: int) -> bool:
    """Tell whether a sliding-window cache still has all positions that the token after `kept` looks at."""
    window = int(session.engine.low.llama_model_n_swa(session.model))
    if window <= 0:
        return True
    oldest = int(session.engine.low.llama_memory_seq_pos_min(session.memory, 0))
    return 0 <= oldest <= max(0, kept - window)


def _cut(session: Session, kept: int) -> bool:
    return bool(session.engine.low.llama_memory_seq_rm(session.memory, 0, kept, -1))

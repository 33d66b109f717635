"""Generating: a prompt is read, then one token after another is chosen, each with its own sampler, stops and limits."""

from __future__ import annotations

import time
from collections.abc import Sequence

from engine.runtime.child.generate.media_reader import MediaReader
from engine.runtime.child.generate.prompt import NOT_REPLACED, Replaced, read_prompt, with_begun
from engine.runtime.child.generate.sampling import ChoiceReader, SamplerChain, settings_of
from engine.runtime.child.generate.slots import Slots
from engine.runtime.child.generate.tasks import SequenceTask
from engine.runtime.child.generate.text import PieceDecoder, StopTexts
from engine.runtime.child.load.loaded_context import LoadedContext
from engine.runtime.child.load.media import MediaPrompt
from engine.runtime.child.native.failures import EndOfRequest, failure
from engine.runtime.protocol.messages import (
    Answer,
    Generate,
    Generated,
    Message,
    Piece,
    Reading,
    StopReason,
    TokenChoice,
)


def begin(loaded: LoadedContext, slots: Slots, request: Generate) -> Generation:
    """Return the generation.

    Raises:
        EndOfRequest: with a `Failure`: the model makes no text, or the prompt cannot be read.
    """
    if not loaded.makes_text:
        raise failure("argument", "This model does not continue text; chat needs a model that generates.")
    if "" in settings_of(request).stop:
        raise failure("argument", "A text that ends the answer is empty; leave it out.")
    prompt, replaced, positions = read_prompt(loaded, request.messages, request.prompt, request.template)
    tokens, first = with_begun(loaded, request, prompt)
    return Generation(loaded, slots, request, tokens, first, prompt, positions=positions, replaced=replaced)


class Generation(SequenceTask):
    """A generation; times in seconds from when it had a slot."""

    def __init__(
        self,
        loaded: LoadedContext,
        slots: Slots,
        request: Generate,
        tokens: list[int],
        first: str,
        prompt: MediaPrompt,
        *,
        positions: Sequence[int] = (),
        replaced: Replaced = NOT_REPLACED,
    ) -> None:
        super().__init__(request.id, tokens, MediaReader(loaded, prompt), positions)
        self._slots = slots
        self._vocabulary = loaded.vocabulary
        self._is_end = loaded.engine.low.llama_vocab_is_eog
        self._cells = prompt.cells
        further_cells = prompt.cells(tokens) - len(tokens)
        self._room = loaded.context_tokens - further_cells
        settings = settings_of(request)
        self._most = settings.max_tokens
        self._sampler = SamplerChain(loaded, settings, [token for token in tokens if token >= 0])
        self._decoder = PieceDecoder(loaded, request.marks)
        self._choices = ChoiceReader(loaded, settings.alternatives) if settings.alternatives else None
        self._chosen: list[TokenChoice] = []
        self._first = first
        self._stops = StopTexts(settings.stop)
        self._prompt_tokens = prompt.cells(tokens)
        self._replaced = replaced
        self._cached = self._evaluated = self._generated = 0
        self._started: float | None = None
        self._begun: float | None = None

    def begin(self) -> None:
        if self._started is None and self.slot is not None:
            self._started = time.perf_counter()
            self._cached = self._cells(self.slot.tokens)

    @property
    def reading(self) -> Reading:
        held = 0 if self.slot is None else self._cells(self.slot.tokens)
        read_tokens = min(held, self._prompt_tokens)
        return Reading(request=self.id, read_tokens=read_tokens, prompt_tokens=self._prompt_tokens)

    def read(self, count: int) -> Answer | None:
        if self._begun is not None:
            return None  # what the memory lost is read once more
        self._evaluated += count
        return self.reading

    def take_logits(self, place: int, answers: list[Message]) -> bool:
        if self._begun is None:
            self._begun = time.perf_counter()
            if self._first:
                answers.append(Piece(request=self.id, text=self._first))
        if self._generated == self._most:
            return self._end("length", answers)
        try:
            token = self._sampler.sample(place)
        except EndOfRequest as end:
            answers.append(end.word_of(self.id))
            return False
        if self._is_end(self._vocabulary, token):
            return self._end("end_of_text", answers)
        self._generated += 1
        if self._choices is not None:
            self._chosen.append(self._choices.read(place, token))
        if text := self._stops.add(self._decoder.add(token)):
            answers.append(self._piece(text))
        if self._stops.found:
            return self._end("end_of_text", answers)
        if len(self.tokens) >= self._room:
            return self._end("context_full", answers)
        if self._generated == self._most:
            return self._end("length", answers)
        self.tokens.append(token)
        return True

    def stopped(self) -> Message:
        return self._last_word("stopped")

    def free(self) -> None:
        super().free()
        self._sampler.free()

    def _end(self, reason: StopReason, answers: list[Message]) -> bool:
        text = "" if self._stops.found else self._stops.add(self._decoder.rest()) + self._stops.rest()
        if text:
            answers.append(self._piece(text))
        answers.append(self._last_word(reason))
        return False

    def _piece(self, text: str) -> Piece:
        if not self._chosen:
            return Piece(request=self.id, text=text)
        chosen, self._chosen = tuple(self._chosen), []
        return Piece(request=self.id, text=text, choices=chosen)

    def _last_word(self, reason: StopReason) -> Generated:
        now = time.perf_counter()
        started = now if self._started is None else self._started
        begun = now if self._begun is None else self._begun
        return Generated(
            request=self.id,
            prompt_tokens=self._prompt_tokens,
            cached_tokens=self._cached,
            evaluated_tokens=self._evaluated,
            generated_tokens=self._generated,
            prompt_seconds=begun - started,
            generation_seconds=now - begun,
            context_used=0 if self.slot is None else self._cells(self.slot.tokens),
            stop_reason=reason,
            replaced=self._replaced.sentence,
            replaced_for_log=self._replaced.for_log,
            checkpoint_bytes=self._slots.checkpoint_bytes,
        )

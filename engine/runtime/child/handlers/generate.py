"""Handler of `Generate`: computes the prompt, then samples one token after another.

`begin` makes a `Generation` from the request. The decode loop puts its tokens into batches, and calls `take_logits`
when the last of them was computed. Each request has its own sampler, stop texts and limits.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence

from engine.runtime.child.generate.draft_gain import AnswerDraft
from engine.runtime.child.generate.media_reader import MediaReader
from engine.runtime.child.generate.prompt import NOT_REPLACED, Replaced, read_prompt, with_answer_start
from engine.runtime.child.generate.repetition import RepetitionDetector
from engine.runtime.child.generate.sampling import ChoiceReader, SamplerChain, settings_of
from engine.runtime.child.generate.shifting import kept_tokens
from engine.runtime.child.generate.slots import Slots
from engine.runtime.child.generate.tasks import SequenceTask
from engine.runtime.child.generate.text import PieceDecoder, StopTexts, joined_text
from engine.runtime.child.load.loaded_context import LoadedContext
from engine.runtime.child.load.media import MediaPrompt
from engine.runtime.child.native.failures import RequestError, failure
from engine.runtime.protocol.messages import (
    Answer,
    Generated,
    Message,
    Piece,
    Reading,
    Shifted,
    StopReason,
    TokenChoice,
)
from engine.runtime.protocol.requests import Generate


def begin(loaded: LoadedContext, slots: Slots, request: Generate) -> Generation:
    """Return the task of a generation.

    Raises:
        RequestError: the model generates no text, or the prompt is empty, too long or cannot be read.
    """
    if not loaded.makes_text:
        raise failure("argument", "This model does not continue text; chat needs a model that generates.")
    if "" in settings_of(request).stop:
        raise failure("argument", "A text that ends the answer is empty; leave it out.")
    prompt, replaced, positions = read_prompt(
        loaded, request.messages, request.prompt, request.template, request.template_input
    )
    kept = kept_tokens(loaded, request, settings_of(request), prompt, replaced)
    tokens, first = with_answer_start(loaded, request, prompt)
    return Generation(loaded, slots, request, tokens, first, prompt, positions=positions, replaced=replaced, kept=kept)


class Generation(SequenceTask):
    """A running generation: the task of a `Generate`.

    `tokens`: the prompt, then the sampled tokens.
    `first`: opening reasoning tag if the prompt ends with one, else empty. It is sent as the first text of the answer.
    `prompt`: the prompt with its images and sounds.
    `positions`: token positions in the prompt at which a checkpoint (copy of the state) is useful.
    `replaced`: why ChatML was used instead of the chat template; empty if the template did not fail.
    `kept`: number of first tokens that stay if a full context is shifted; None: the answer ends in a full context.
    """

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
        kept: int | None = None,
    ) -> None:
        super().__init__(request.id, tokens, MediaReader(loaded, prompt), positions, request.text_interval_s)
        self._slots = slots
        self._vocabulary = loaded.vocabulary
        self._is_end = loaded.engine.low.llama_vocab_is_eog
        self._cells = prompt.cells
        # An image with M-RoPE takes more KV cells than positions. All images are in the prompt, so that the difference
        # stays the same for the whole answer.
        self._further_cells = prompt.cells(tokens) - len(tokens)
        self._room = loaded.context_tokens - self._further_cells
        settings = settings_of(request)
        self._most = settings.max_tokens
        self._sampler = SamplerChain(loaded, settings, [token for token in tokens if token >= 0])
        self._decoder = PieceDecoder(loaded, request.marks)
        self._choices = ChoiceReader(loaded, settings.alternatives) if settings.alternatives else None
        self._chosen: list[TokenChoice] = []
        self._first = first
        self._stops = StopTexts(settings.stop)
        self._repetition = (
            RepetitionDetector(lambda found: joined_text(loaded, found)) if settings.repetition == "end" else None
        )
        self._prompt_tokens = prompt.cells(tokens)
        self._replaced = replaced
        self._kept, self._dropped = kept, 0
        self._cached = self._evaluated = self._generated = 0
        self._started: float | None = None
        self._begun: float | None = None
        if loaded.draft is not None:
            self.draft = AnswerDraft(loaded.draft.kind, pauses=loaded.draft.pauses)

    def begin(self) -> None:
        if self._started is None and self.slot is not None:
            self._started = time.perf_counter()
            self._cached = self._cells(self.slot.tokens)

    @property
    def is_answering(self) -> bool:
        return self._begun is not None

    @property
    def draftable(self) -> int:
        if self._begun is None:
            return 0
        # A draft of n tokens gives up to n + 1, and takes n KV cells besides that of the last token.
        left = math.inf if self._most is None else self._most - self._generated - 1
        return int(min(left, self._room - len(self.tokens)))

    @property
    def reading(self) -> Reading:
        # Read once: this may be called in the heartbeat's thread while the slot is taken away.
        slot = self.slot
        held = 0 if slot is None else self._cells(slot.tokens)
        read_tokens = min(held, self._prompt_tokens)
        return Reading(
            request=self.id,
            read_tokens=read_tokens,
            prompt_tokens=self._prompt_tokens,
            cached_tokens=min(self._cached, read_tokens),
        )

    def read(self, count: int) -> Answer | None:
        if self._begun is not None:
            return None  # After a failed batch a running answer computes its tokens again; that is no progress.
        self._evaluated += count
        return self.reading

    def take_logits(self, index: int, answers: list[Message]) -> bool:
        if self._begun is None:
            self._begun = time.perf_counter()
            if self._first:
                answers.append(self._piece(self._first))
        # With a limit of 0 tokens nothing is sampled.
        if self._generated == self._most:
            return self._end("length", answers)
        try:
            token = self._sampler.sample(index)
        except RequestError as end:
            answers.append(end.message_for(self.id))
            return False
        # Checked before the token is counted: the end of the answer is no text.
        if self._is_end(self._vocabulary, token):
            return self._end("end_of_text", answers)
        self._generated += 1
        if self._choices is not None:
            self._chosen.append(self._choices.read(index, token))
        if text := self._stops.add(self._decoder.add(token)):
            answers.append(self._piece(text))
        if self._stops.found:
            return self._end("end_of_text", answers)
        if self._repetition is not None and self._repetition.add(token):
            return self._end("repetition", answers)
        # The sampled token would need a cell of its own to be decoded.
        if self._generated < (self._most or math.inf) and len(self.tokens) >= self._room and not self._shift(answers):
            return self._end("context_full", answers)
        if self._generated == self._most:
            return self._end("length", answers)
        self.tokens.append(token)
        return True

    def _shift(self, answers: list[Message]) -> bool:
        """Shift a full context if the settings allow it; return whether the context has room now."""
        if self._kept is None or self.slot is None:
            return False
        dropped = self._slots.shift(self.slot, self._kept)
        if not dropped:
            return False
        del self.tokens[self._kept : self._kept + dropped]
        if self.draft is not None:
            self.draft.forget()
        self._dropped += dropped
        answers.append(Shifted(request=self.id, kept_tokens=self._kept, dropped_tokens=dropped))
        return True

    def stopped(self) -> Sequence[Message]:
        # Without the rest of the decoder: half a character is no text of an answer that goes on no further.
        text = self._stops.rest()
        return [*([self._piece(text)] if text else []), self._final_message("stopped")]

    def free(self) -> None:
        super().free()
        self._sampler.free()

    def _end(self, reason: StopReason, answers: list[Message]) -> bool:
        text = "" if self._stops.found else self._stops.add(self._decoder.rest()) + self._stops.rest()
        if text:
            answers.append(self._piece(text))
        answers.append(self._final_message(reason))
        return False

    def _piece(self, text: str) -> Piece:
        # The whole prompt is in the cache by now, so that this counts as `_cells` does, which would take longer.
        held = None if self.slot is None else len(self.slot.tokens) + self._further_cells
        chosen, self._chosen = tuple(self._chosen), []
        return Piece(request=self.id, text=text, choices=chosen, context_used=held)

    def _final_message(self, reason: StopReason) -> Generated:
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
            stop_text=self._stops.found,
            replaced=self._replaced.sentence,
            replaced_for_log=self._replaced.for_log,
            checkpoint_bytes=self._slots.checkpoint_bytes,
            dropped_tokens=self._dropped,
            draft=None if self.draft is None else self.draft.statistics,
        )

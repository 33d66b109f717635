"""Tasks of the decode loop: requests that take longer than a single call.

The tokens of a `SequenceTask` (generation) are computed in a batch that all such tasks share. A `StandaloneTask`
(embeddings, saved KV states) does its own work in parts, between two batches.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

from engine.runtime.child.generate.draft_gain import AnswerDraft
from engine.runtime.child.generate.media_reader import MediaReader
from engine.runtime.child.generate.slots import Slot, Slots
from engine.runtime.child.load.media import MediaChunk
from engine.runtime.child.native.failures import failure
from engine.runtime.protocol.messages import Answer, FinalMessage, Message, Reading, Saving
from engine.runtime.protocol.requests import STREAM_INTERVAL_S


class Task:
    """A request that the decode loop carries out. `id`: id of the request."""

    def __init__(self, request: int) -> None:
        self.id = request

    def stopped(self) -> Sequence[Message]:
        """Return the messages to send when the request is stopped; the last one ends the request."""
        return [failure("cancelled", "The request was stopped.").message_for(self.id)]

    def free(self) -> None:
        """Free the native objects of this task. Called when the task has ended."""

    @property
    def reading(self) -> Reading | Saving:
        """Message about the progress of the prompt, of the texts to embed, or of saving a KV state."""
        return Reading(request=self.id, read_tokens=0, prompt_tokens=0)


class SequenceTask(Task, ABC):
    """A request whose tokens are computed in the common batch; the logits of its last token give the next token.

    `tokens`: all tokens of the prompt and the answer so far. The decode loop computes those that the slot lacks.
    `media`: computes the images and sounds among the tokens.
    `checkpoint_positions`: token positions at which a checkpoint is useful; empty if none is needed.
    `text_interval_s`: longest time in seconds for which text of the answer is held back.
    `slot`: slot of the task; None while it waits for one.
    `draft`: draft statistics of the task; None if nothing is drafted for it.
    """

    def __init__(
        self,
        request: int,
        tokens: list[int],
        media: MediaReader,
        checkpoint_positions: Sequence[int] = (),
        text_interval_s: float = STREAM_INTERVAL_S,
    ) -> None:
        super().__init__(request)
        self.tokens = tokens
        self.media = media
        self.checkpoint_positions = checkpoint_positions
        self.text_interval_s = text_interval_s
        self.slot: Slot | None = None
        self.draft: AnswerDraft | None = None

    @property
    def is_answering(self) -> bool:
        """Whether the whole prompt has been computed, so that each batch adds a token to the answer."""
        return False

    @property
    def draftable(self) -> int:
        """Largest number of tokens that may be drafted now; 0 or less: no draft is possible."""
        return 0

    @property
    def missing(self) -> int:
        """Number of tokens that must still be computed."""
        return len(self.tokens) - (0 if self.slot is None else len(self.slot.tokens))

    @property
    def readable(self) -> int:
        """Number of tokens to compute before the next image or sound; if none follows, before the end of `tokens`."""
        if self.slot is None or not self.media.prompt.parts:
            return self.missing
        held = len(self.slot.tokens)
        return next((index for index, token in enumerate(self.tokens[held:]) if token < 0), self.missing)

    @property
    def next_chunk(self) -> MediaChunk | None:
        """The part of an image or sound that must be computed next; None if text tokens come next."""
        if self.slot is None or not self.missing or self.readable:
            return None
        return self.media.prompt.parts[self.tokens[len(self.slot.tokens)]]

    def free(self) -> None:
        self.media.free()

    def begin(self) -> None:
        """Start the task; called when its `slot` is assigned.

        Tokens that the slot already has are not computed again.
        """

    @abstractmethod
    def read(self, count: int) -> Answer | None:
        """Record the progress after a batch; return a message about it while the prompt is computed, and None later.

        `count`: number of KV cells that the batch filled.
        """

    @abstractmethod
    def take_logits(self, index: int, answers: list[Message]) -> bool:
        """Use the logits of the last token: append a token to `tokens`, or the final message to `answers`.

        Return whether the task continues. `index`: index of the logits in the batch.
        """


class StandaloneTask(Task, ABC):
    """A request that does its own work in parts, between two batches.

    `n_slots`: largest number of empty slots that the task can use. The task waits until at least one is free. 0: it
    needs no slot and does not wait.
    """

    n_slots = 0

    def __init__(self, request: int) -> None:
        super().__init__(request)
        self.slots: Sequence[Slot] = ()

    @abstractmethod
    def run_slice(self, slots: Slots) -> FinalMessage | None:
        """Do the next part of the work: compute a batch of texts to embed, or continue to save or restore a KV state.

        Return the final message of the request after the last part, else None.

        `slots`: all slots of the context.

        Raises:
            RequestError: the request failed.
        """

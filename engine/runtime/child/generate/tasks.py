"""What the decode loop works on: requests that take more than a moment."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

from engine.runtime.child.generate.media_reader import MediaReader
from engine.runtime.child.generate.slots import Slot, Slots
from engine.runtime.child.load.media import MediaPart
from engine.runtime.child.native.failures import failure
from engine.runtime.protocol.messages import Answer, LastWord, Message, Reading


class Task:
    """A request under way. `id` is the request's."""

    def __init__(self, request: int) -> None:
        self.id = request

    def stopped(self) -> Message:
        """Return the last word of a request that is ended from outside."""
        return failure("cancelled", "The request was stopped.").word_of(self.id)

    def free(self) -> None:
        """Give back what the engine holds for it."""

    @property
    def reading(self) -> Reading:
        """How far its texts have been read."""
        return Reading(request=self.id, read_tokens=0, prompt_tokens=0)


class SequenceTask(Task, ABC):
    """A request that has a sequence read and goes on by the logits of its end, in a batch with others.

    `tokens` is all that its slot is to hold; what the slot does not hold yet is read, images and sounds among it by
    `media`.
    `checkpoint_positions`: after how many of them a checkpoint is of use, if the memory needs any.
    """

    def __init__(
        self, request: int, tokens: list[int], media: MediaReader, checkpoint_positions: Sequence[int] = ()
    ) -> None:
        super().__init__(request)
        self.tokens = tokens
        self.media = media
        self.checkpoint_positions = checkpoint_positions
        self.slot: Slot | None = None

    @property
    def missing(self) -> int:
        """How many tokens are still to be read."""
        return len(self.tokens) - (0 if self.slot is None else len(self.slot.tokens))

    @property
    def readable(self) -> int:
        """How many tokens are to be read until the next image or sound."""
        if self.slot is None or not self.media.prompt.parts:
            return self.missing
        held = len(self.slot.tokens)
        return next((place for place, token in enumerate(self.tokens[held:]) if token < 0), self.missing)

    @property
    def next_part(self) -> MediaPart | None:
        """The part of an image or a sound that is to be read next; None where tokens are."""
        if self.slot is None or not self.missing or self.readable:
            return None
        return self.media.prompt.parts[self.tokens[len(self.slot.tokens)]]

    def free(self) -> None:
        self.media.free()

    def begin(self) -> None:
        """Note that `slot` is there; what it holds is not read again."""

    @abstractmethod
    def read(self, count: int) -> Answer | None:
        """Note that some tokens have been read, not yet all; return what is to be told of it."""

    @abstractmethod
    def take_logits(self, place: int, answers: list[Message]) -> bool:
        """Go on by the logits at a place of the batch: `tokens` grow, or the last word is added to the `answers`.

        Returns whether it goes on.
        """


class TurnTask(Task, ABC):
    """A request that computes by itself, a turn at a time between batches. `wants`: the slots that it has use for; with
    none it waits for none."""

    wants = 0

    def __init__(self, request: int) -> None:
        super().__init__(request)
        self.slots: Sequence[Slot] = ()

    @abstractmethod
    def turn(self, slots: Slots) -> LastWord | None:
        """Do a part of the work; return the last word with the last part.

        Raises:
            EndOfRequest: with the `Failure`.
        """

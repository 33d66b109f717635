"""One loop for all requests on a loaded model: running answers get a token in each batch, prompts what room is left.

Requests beyond the slots wait in the order of their arrival. A sequence that the memory lost is read once more. `Pace`
says how much of prompts goes into one batch: what can be computed before somebody waits too long.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from engine.runtime.child.generate.slots import Slot, Slots
from engine.runtime.child.generate.tasks import SequenceTask, Task, TurnTask
from engine.runtime.child.kinds import begin
from engine.runtime.child.load.loaded_context import ABORTED, DECODED, NO_SLOT, Batch, LoadedContext
from engine.runtime.child.native.failures import EndOfRequest, failure
from engine.runtime.child.native.log import FreeMemory
from engine.runtime.child.native.stop import StopRequest
from engine.runtime.protocol.messages import Message, ModelRequest

FIRST_TOKENS = 32
"""Before the speed is known: few, since a layout on the CPU may do one a second."""
ALONE_SECONDS = 2.0
"""Then what can be computed in this time: several micro batches at once keep several devices busy, and a batch cut
small reads the weights more often. A stop ends it earlier, and signs of life are given meanwhile."""
BESIDE_SECONDS = 0.15
"""The same where answers wait for their next token meanwhile."""


class Pace:
    """Follows how fast prompts are read; `most` is what a batch holds."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._tokens_per_second: float | None = None

    def tokens(self, *, beside_answers: bool) -> int:
        """Return how many tokens of prompts to take."""
        if self._tokens_per_second is None:
            return min(FIRST_TOKENS, self._most)
        seconds = BESIDE_SECONDS if beside_answers else ALONE_SECONDS
        return min(self._most, max(FIRST_TOKENS, int(self._tokens_per_second * seconds)))

    def note(self, tokens: int, seconds: float) -> None:
        """Learn from a batch; one with few tokens of prompts tells nothing."""
        if tokens >= min(FIRST_TOKENS, self._most):
            self._tokens_per_second = tokens / max(seconds, 1e-9)


class _Share(NamedTuple):
    """Tokens `begin` to `end` of a task in a batch, the place of the last one there, and the cells that they take."""

    task: SequenceTask
    slot: Slot
    begin: int
    end: int
    place: int
    cells: int


class DecodeLoop:
    """The requests on one loaded context. `send` is given messages in the order in which they are to go out."""

    def __init__(self, loaded: LoadedContext, stop: StopRequest, send: Callable[[Iterable[Message]], None]) -> None:
        self._loaded = loaded
        self._stop = stop
        self._send = send
        self._telling = threading.Lock()
        self._slots = Slots(loaded)
        self._free = FreeMemory(loaded.devices)
        self._batch = Batch(loaded.engine, loaded.batch_tokens)
        self._pace = Pace(self._batch.size)
        self._waiting: deque[Task] = deque()
        self._running: list[SequenceTask] = []
        self._turns: deque[TurnTask] = deque()
        self._first_reader = 0
        self._crowded = False

    @property
    def busy(self) -> bool:
        return bool(self._running or self._turns or self._waiting)

    def take(self, request: ModelRequest) -> None:
        """Begin a request: it is answered, or runs from now on, or waits for a slot."""
        try:
            if any(task.id == request.id for task in self._tasks()):
                raise failure("internal", f"A request with the number {request.id} is under way already.")
            begun = begin(self._loaded, self._slots, request)
        except EndOfRequest as end:
            self._tell(end.word_of(request.id))
            return
        if isinstance(begun, Task):
            self._waiting.append(begun)
        else:
            self._tell(begun)

    def stop(self, request: int | None) -> None:
        """End one request or, without a number, all."""
        for task in [task for task in self._tasks() if request in (None, task.id)]:
            self._end(task, task.stopped())

    def tell_reading(self) -> None:
        """Give a sign of life; for any thread."""
        with self._telling:
            for task in (*self._running, *self._turns)[:1]:
                self._send((task.reading,))

    def lose_memory(self) -> None:
        """Note that somebody else used the memory."""
        self._slots.empty_all()

    def step(self) -> None:
        """Begin what may begin, then compute one batch and one turn."""
        self._admit()
        if any(task.readable for task in self._running):
            self._compute()
        self._read_media()
        if self._turns:
            self._take_turn()

    def _tell(self, *messages: Message) -> None:
        """Send messages; a request that has left is not spoken of after its last word."""
        with self._telling:
            self._send(messages)

    def _tasks(self) -> list[Task]:
        return [*self._running, *self._turns, *self._waiting]

    # ------------------------------------------------------------------ beginning and ending

    def _admit(self) -> None:
        while self._waiting and not self._crowded:
            task = self._waiting[0]
            if isinstance(task, SequenceTask):
                slot = self._slots.take(task.id, task.tokens)
                if slot is None:
                    return
                task.slot = slot
                task.begin()
                self._running.append(task)
                # the engine computes neighbours together
                self._running.sort(key=_slot_number)
            elif isinstance(task, TurnTask):
                task.slots = self._slots.take_free(task.id, task.wants)
                if task.wants and not task.slots:
                    return
                self._turns.append(task)
            self._waiting.popleft()

    def _end(self, task: Task, last_word: Message) -> None:
        self._leave(task)
        task.free()
        self._tell(last_word)

    def _leave(self, task: Task) -> None:
        """Take a task out of everything; its slot keeps what is cached."""
        if isinstance(task, SequenceTask):
            if task in self._running:
                self._running.remove(task)
            if task.slot is not None:
                self._slots.give_back(task.slot)
        elif isinstance(task, TurnTask):
            if task in self._turns:
                self._turns.remove(task)
            for slot in task.slots:
                self._slots.give_back(slot)
        if task in self._waiting:
            self._waiting.remove(task)
        self._crowded = False

    # ------------------------------------------------------------------ batches

    def _compute(self) -> None:
        shares = self._fill()
        self._loaded.log.begin_computation(self._free.note)
        started = time.perf_counter()
        self._stop.begin_computing([share.task.id for share in shares])
        try:
            status = self._loaded.compute(self._batch.struct)
        finally:
            self._stop.end_computing()
        if status == DECODED:
            if self._batch.count > len(shares):
                prompt_tokens = sum(share.end - share.begin for share in shares if share.end - share.begin > 1)
                self._pace.note(prompt_tokens, time.perf_counter() - started)
            self._go_on(shares)
        elif status == NO_SLOT:
            self._make_room(shares)
        else:
            self._recover(shares, status)

    def _fill(self) -> list[_Share]:
        """Put one token of each answer and parts of the prompts into the batch, by slots."""
        batch = self._batch
        batch.clear()
        counts = self._counts()
        shares = []
        for task, count in zip(self._running, counts, strict=True):
            slot = task.slot
            if slot is None or not count:
                continue
            tokens, held = task.tokens, len(slot.tokens)
            end = held + count
            if count == 1 and end == len(tokens):
                place = batch.add(tokens[held], held, slot.number)
            else:
                place = batch.extend(tokens[held:end], held, slot.number, outputs=int(end == len(tokens)))
            shares.append(_Share(task, slot, held, end, place, count))
        return shares

    def _counts(self) -> list[int]:
        """Return how many tokens of each running request go into the next batch."""
        missing = [self._until_checkpoint(task) for task in self._running]
        if max(missing) <= 1:
            return missing
        readers = [index for index, count in enumerate(missing) if count > 1]
        answers = len(missing) - len(readers)
        room = min(self._batch.size - answers, self._pace.tokens(beside_answers=answers > 0))
        first = self._first_reader = (self._first_reader + 1) % len(readers)
        in_turn = readers[first:] + readers[:first]
        counts = shared(room, [missing[index] for index in in_turn])
        for index, count in zip(in_turn, counts, strict=True):
            missing[index] = count
        return missing

    def _until_checkpoint(self, task: SequenceTask) -> int:
        """Return how many tokens are read before a checkpoint is taken, or an image or a sound comes."""
        if task.slot is None:
            return task.missing
        return min(task.readable, self._slots.until_checkpoint(task.slot, task.missing, task.checkpoint_positions))

    def _go_on(self, shares: Sequence[_Share]) -> None:
        """Let the tasks go on by what was computed, and tell what came of it at once."""
        answers: list[Message] = []
        ended: list[SequenceTask] = []
        for task, slot, begun, end, place, cells in shares:
            if end == begun + 1:
                slot.tokens.append(task.tokens[begun])
            else:
                slot.tokens += task.tokens[begun:end]
            slot.copied = False
            self._slots.checkpoint_if_due(slot, task.tokens, task.checkpoint_positions)
            told = task.read(cells)
            if told is not None:
                answers.append(told)
            if end == len(task.tokens) and not task.take_logits(place, answers):
                ended.append(task)
        for task in ended:
            self._leave(task)
            task.free()
        if answers:
            self._tell(*answers)

    def _make_room(self, shares: Sequence[_Share]) -> None:
        """No cells are left: forget what nobody uses, else let the youngest request wait for the end of another."""
        if self._slots.empty_free():
            return
        if len(self._running) == 1:
            task = shares[0].task
            refused = failure("argument", "The context is full. Clear the conversation or load with a longer context.")
            self._end(task, refused.word_of(task.id))
            return
        youngest = max(self._running, key=lambda task: task.slot.used if task.slot is not None else 0)
        self._running.remove(youngest)
        if youngest.slot is not None:
            self._slots.empty(youngest.slot)
            self._slots.give_back(youngest.slot)
            youngest.slot = None
        self._waiting.appendleft(youngest)
        self._crowded = True

    def _recover(self, shares: Sequence[_Share], status: int) -> None:
        """Go on after a batch that was ended or failed, with as little loss as the engine allows."""
        last_word = None if status == ABORTED else EndOfRequest(self._loaded.failed_computation(status, self._free))
        if self._loaded.has_recurrent_state:
            self._slots.go_back()
        else:
            for share in shares:
                self._slots.settle(share.slot, share.task.tokens)
        if last_word is None:
            return  # the stops behind it have been read and end the tasks
        # a long prompt may be too much where answers alone are not
        readers = [share for share in shares if share.end - share.begin > 1]
        for share in readers or shares:
            self._slots.empty(share.slot)
            self._end(share.task, last_word.word_of(share.task.id))

    # ------------------------------------------------------------------ images and sounds

    def _read_media(self) -> None:
        """Read the next part of an image or a sound, if a prompt has come to one."""
        task = next((task for task in self._running if task.next_part is not None), None)
        if task is None or task.slot is None or task.next_part is None:
            return
        slot, part = task.slot, task.next_part
        begin = len(slot.tokens)
        share = _Share(task, slot, begin, begin + part.n_positions, -1, part.n_cells)
        self._loaded.log.begin_computation(self._free.note)
        try:
            with self._stop.computing([task.id]):
                status = task.media.read(part, begin, slot.number, self._stop)
        except EndOfRequest as end:
            self._end(task, end.word_of(task.id))
            return
        if status == DECODED:
            self._go_on((share,))
        elif status == NO_SLOT:
            # what fitted of the part is read once more
            self._slots.forget_end(slot)
            self._make_room((share,))
        else:
            self._recover((share,), status)

    # ------------------------------------------------------------------ turns

    def _take_turn(self) -> None:
        task = self._turns[0]
        self._turns.rotate(-1)
        last_word: Message | None
        try:
            with self._stop.computing([task.id]):
                last_word = task.turn(self._slots)
        except EndOfRequest as end:
            last_word = end.word_of(task.id)
        if last_word is not None:
            self._end(task, last_word)
        else:
            self._tell(task.reading)


def shared(room: int, wants: Sequence[int]) -> list[int]:
    """Share `room` evenly among those who want some; what one does not need goes to the next. Each gets one at least,
    while there is room."""
    counts = [0] * len(wants)
    left = room
    hungry = [index for index, want in enumerate(wants) if want > 0]
    while hungry and left > 0:
        part = max(1, left // len(hungry))
        for index in list(hungry):
            count = min(part, wants[index] - counts[index], left)
            counts[index] += count
            left -= count
            if counts[index] == wants[index]:
                hungry.remove(index)
    return counts


def _slot_number(task: SequenceTask) -> int:
    return -1 if task.slot is None else task.slot.number

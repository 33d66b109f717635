"""The decode loop: computes all requests to a loaded model in common batches.

Each batch has one token of every running answer, perhaps with drafted ones after it (`Drafting`), and as many tokens of
prompts as `PromptBudget` allows. Requests beyond the free slots wait in the order of their arrival. If a failed batch
damaged a sequence, the tokens of the sequence are computed again.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from engine.runtime.child.generate.checkpoints import Checkpoint
from engine.runtime.child.generate.drafting import Drafting, Step
from engine.runtime.child.generate.mtp_drafter import Computed
from engine.runtime.child.generate.outbox import Outbox
from engine.runtime.child.generate.prompt_budget import LONGEST_REMOTE_S, PromptBudget
from engine.runtime.child.generate.slots import Slot, Slots
from engine.runtime.child.generate.tasks import SequenceTask, StandaloneTask, Task
from engine.runtime.child.handlers import begin
from engine.runtime.child.load.loaded_context import ABORTED, DECODED, NO_SLOT, Batch, LoadedContext
from engine.runtime.child.native.failures import RequestError, failure, look_at_nodes
from engine.runtime.child.native.log import FreeMemory
from engine.runtime.child.native.stop import StopFlag
from engine.runtime.protocol.messages import Message, Reading, Saving
from engine.runtime.protocol.requests import ModelRequest


class _Share(NamedTuple):
    """The part of a batch that belongs to one task.

    `begin`, `end`: range of the computed tokens in the task's token list.
    `batch_index`: index in the batch of the last of these tokens. Its logits are used, and drafted tokens follow it.
    `cells`: number of KV cells that the tokens take.
    `drafts`: drafted tokens.
    `copy`: state of the slot before the batch, if rejected drafts can be removed only by restoring it.
    `is_answer`: whether the task was answering before the batch.
    """

    task: SequenceTask
    slot: Slot
    begin: int
    end: int
    batch_index: int
    cells: int
    drafts: Sequence[int] = ()
    copy: Checkpoint | None = None
    is_answer: bool = False

    @property
    def computed(self) -> Computed:
        """The task's tokens in the batch, with position in the sequence and index in the batch, for `Drafting`."""
        tokens = [*self.task.tokens[self.begin : self.end], *self.drafts]
        index = self.batch_index + 1 - (self.end - self.begin)
        return Computed(self.slot.number, self.begin, index, tokens, not self.drafts)


class DecodeLoop:
    """Computes all requests to one loaded context in common batches.

    The main thread passes requests to `take`, and calls `step` as long as the loop is busy. Only `send_progress` and
    `may_wait` may be called in another thread.

    `stop`: flag that is set if a request must stop, by the thread that reads requests.
    `send`: sends messages in their order.
    """

    def __init__(self, loaded: LoadedContext, stop: StopFlag, send: Callable[[Iterable[Message]], None]) -> None:
        self._loaded = loaded
        self._stop = stop
        self._outbox = Outbox(send)
        self._batch_s = 0.0
        self._slots = Slots(loaded)
        self._free = FreeMemory(loaded.devices)
        self._batch = Batch(loaded.engine, loaded.decoded_tokens)
        longest_s = LONGEST_REMOTE_S if loaded.devices.remote else math.inf
        self._prompt_budget = PromptBudget(self._batch.size, loaded.settings.n_ubatch, longest_s)
        self._waiting: deque[Task] = deque()
        self._running: list[SequenceTask] = []
        self._standalone: deque[StandaloneTask] = deque()
        self._taken: int | None = None
        self._first_reader = 0
        self._crowded = False
        self._drafting = None if loaded.draft is None else Drafting(loaded, loaded.draft, self._slots, stop)

    @property
    def busy(self) -> bool:
        return bool(self._running or self._standalone or self._waiting)

    def take(self, request: ModelRequest) -> None:
        """Accept a request.

        A quick request is answered at once; a request that needs a slot waits in `_waiting` for a free one.
        """
        self._taken = request.id
        begun: Task | Message
        try:
            if any(task.id == request.id for task in self._tasks()):
                raise failure("internal", f"A request with the number {request.id} is already in progress.")
            begun = begin(self._loaded, self._slots, request)
        except (RequestError, MemoryError) as end:
            begun = _failure_of(end, request.id)
        # Before the answer is sent: no heartbeat of the request may follow.
        self._taken = None
        if isinstance(begun, Task):
            self._waiting.append(begun)
        else:
            self._outbox.send(begun)

    def stop(self, request: int | None) -> None:
        """Stop the request with this number; None stops all."""
        # A copy, because `_end` changes the lists of tasks.
        for task in [task for task in self._tasks() if request in (None, task.id)]:
            self._end(task, *task.stopped())

    def send_progress(self) -> None:
        """Send the progress of a running request (`Reading`) as a heartbeat. May be called in any thread.

        If no request is running, the progress of the request that `take` is accepting is sent: its prompt may be long
        to tokenise. If a computation has exceeded the time limit of its operations, the process ends instead.
        """
        look_at_nodes()
        self._outbox.send_reading(self._reading)

    def _reading(self) -> list[Reading | Saving]:
        running, taken = (*self._running, *self._standalone), self._taken
        if running or taken is None:
            return [task.reading for task in running[:1]]
        return [Reading(request=taken, read_tokens=0, prompt_tokens=0)]

    def may_wait(self) -> bool:
        """Return whether this process may be waiting for RPC workers that compute a batch.

        The process then sends heartbeats even if it uses no processor time itself. May be called in any thread.
        """
        return self._loaded.may_wait()

    def lose_memory(self) -> None:
        """Empty all slots, because other code is going to use the context's KV cache."""
        self._slots.empty_all()

    def step(self) -> None:
        """Assign free slots to waiting requests; then compute one batch, one part of an image or sound, and one part of
        a standalone task (`StandaloneTask`).
        """
        self._admit()
        if any(task.readable for task in self._running):
            self._compute()
        self._read_media()
        if self._standalone:
            self._run_standalone()

    def _tasks(self) -> list[Task]:
        return [*self._running, *self._standalone, *self._waiting]

    # ------------------------------------------------------------------ beginning and ending

    def _admit(self) -> None:
        # Strictly in the order of arrival: a later request with a cached prefix does not overtake an earlier one.
        # `_crowded`: no KV cells were left, so that nothing new begins until a request has ended.
        while self._waiting and not self._crowded:
            task = self._waiting[0]
            if isinstance(task, SequenceTask):
                slot = self._slots.take(task.id, task.tokens)
                if slot is None:
                    return
                task.slot = slot
                task.begin()
                if self._drafting is not None:
                    self._drafting.begin(task)
                self._running.append(task)
                # With several streams llama.cpp puts only sequences with consecutive ids into a micro batch
                # (llama_batch_allocr::split_equal).
                self._running.sort(key=_slot_number)
            elif isinstance(task, StandaloneTask):
                task.slots = self._slots.take_free(task.id, task.n_slots)
                if task.n_slots and not task.slots:
                    return
                self._standalone.append(task)
            self._waiting.popleft()

    def _end(self, task: Task, *messages: Message) -> None:
        """Remove a task from the loop, and send its last messages."""
        self._leave(task)
        task.free()
        self._outbox.send(*messages)

    def _leave(self, task: Task) -> None:
        """Remove a task from the loop and release its slots. The tokens of the slots stay cached."""
        if isinstance(task, SequenceTask):
            if task in self._running:
                self._running.remove(task)
            if task.slot is not None:
                self._slots.release(task.slot)
        elif isinstance(task, StandaloneTask):
            if task in self._standalone:
                self._standalone.remove(task)
            for slot in task.slots:
                self._slots.release(slot)
        if task in self._waiting:
            self._waiting.remove(task)
        self._crowded = False

    # ------------------------------------------------------------------ batches

    def _compute(self) -> None:
        self._loaded.log.begin_computation(self._free.note)
        drafting_since = time.perf_counter()
        shares = self._fill()
        if not all(share.is_answer for share in shares):
            # A batch of prompt tokens takes longer than the last one may have taken.
            self._outbox.send()
        started = time.perf_counter()
        self._stop.begin_computing([share.task.id for share in shares])
        try:
            status = self._loaded.compute(self._batch.struct)
        finally:
            self._stop.end_computing()
        self._batch_s = time.perf_counter() - drafting_since
        if status == DECODED:
            # A batch of nothing but single tokens says nothing about the speed of prompts.
            if self._batch.count > len(shares):
                prompt_tokens = sum(share.end - share.begin for share in shares if share.end - share.begin > 1)
                self._prompt_budget.note(prompt_tokens, time.perf_counter() - started)
            if self._drafting is not None:
                self._drafting.read([(share.task, share.computed) for share in shares])
            self._go_on(shares)
            if self._drafting is not None:
                steps = [Step(each.task, each.is_answer, each.end - each.begin, len(each.drafts)) for each in shares]
                self._drafting.note(steps, time.perf_counter() - drafting_since)
        elif status == NO_SLOT and self._drafting is not None and any(share.drafts for share in shares):
            # Nothing was computed. Without drafts there may be room.
            self._drafting.skip_once()
        elif status == NO_SLOT:
            self._make_room(shares)
        else:
            self._recover(shares, status)

    def _fill(self) -> list[_Share]:
        """Fill the batch with a token of each answer, drafts, and parts of the prompts; return each task's part."""
        batch = self._batch
        batch.clear()
        counts = self._counts()
        drafts: Sequence[Sequence[int]] = [()] * len(counts)
        if self._drafting is not None:
            drafts = self._drafting.drafts(self._running, counts, batch.size - sum(counts))
        shares = []
        for task, count, drafted in zip(self._running, counts, drafts, strict=True):
            slot = task.slot
            if slot is None or not count:
                continue
            tokens, held = task.tokens, len(slot.tokens)
            end = held + count
            copy = None
            # The usual case, one token of an answer, without slices.
            if count == 1 and end == len(tokens) and not drafted:
                index = batch.add(tokens[held], held, slot.number)
            else:
                if drafted:
                    copy = self._slots.copy_state(slot)
                # Logits are needed after the last known token and after each draft, but not inside a prompt.
                outputs = len(drafted) + (end == len(tokens))
                index = batch.extend([*tokens[held:end], *drafted], held, slot.number, outputs=outputs) - len(drafted)
            shares.append(_Share(task, slot, held, end, index, count, drafted, copy, task.is_answering))
        return shares

    def _counts(self) -> list[int]:
        """Return how many tokens of each running request go into the next batch.

        Each answer gets one token. Prompts share the rest of the batch evenly; they take turns in getting the tokens
        that are left over by the division.
        """
        missing = [self._until_checkpoint(task) for task in self._running]
        # A micro batch may have fewer tokens than there are slots; then answers take turns too.
        is_short = len(missing) > self._batch.size
        if max(missing) <= 1 and not is_short:
            return missing
        readers = [index for index, count in enumerate(missing) if count > 1 or is_short]
        answers = len(missing) - len(readers)
        wanted = sum(missing) - answers
        room = min(self._batch.size - answers, self._prompt_budget.tokens(wanted, with_answers=answers > 0))
        first = self._first_reader = (self._first_reader + 1) % len(readers)
        in_turn = readers[first:] + readers[:first]
        # `share_evenly` gives the remainder of the division to the first of the list, so the list is rotated.
        counts = share_evenly(room, [missing[index] for index in in_turn])
        for index, count in zip(in_turn, counts, strict=True):
            missing[index] = count
        return missing

    def _until_checkpoint(self, task: SequenceTask) -> int:
        """Return how many of a task's tokens the next batch may have.

        The batch ends at the task's next checkpoint, and before its next image or sound.
        """
        if task.slot is None:
            return task.missing
        return min(task.readable, self._slots.until_checkpoint(task.slot, task.missing, task.checkpoint_positions))

    def _go_on(self, shares: Sequence[_Share]) -> None:
        """Continue after a computed batch: add its tokens to the slots, sample the next ones, and send the messages."""
        answers: list[Message] = []
        ended: list[SequenceTask] = []
        for share in shares:
            task, slot, begun, end = share.task, share.slot, share.begin, share.end
            if end == begun + 1:
                slot.tokens.append(task.tokens[begun])
            else:
                slot.tokens += task.tokens[begun:end]
            # llama.cpp has made pending copies between streams with this batch.
            slot.copy_pending = False
            # With drafts the state includes tokens that may be rejected; `_sample` takes the checkpoint then.
            if not share.drafts:
                self._slots.checkpoint_if_due(slot, task.tokens, task.checkpoint_positions)
            answer = task.read(share.cells)
            if answer is not None:
                answers.append(answer)
            if end == len(task.tokens) and not self._sample(share, answers):
                ended.append(task)
        for task in ended:
            self._leave(task)
            task.free()
        # Without a running task nothing is held back: the final messages of the ended ones are among `answers`.
        interval_s = min((task.text_interval_s for task in self._running), default=0.0)
        self._outbox.send_soon(answers, self._batch_s, interval_s)

    def _sample(self, share: _Share, answers: list[Message]) -> bool:
        """Sample a task's next token, and one more after each accepted draft; remove rejected drafts from the slot.

        Return whether the task continues.
        """
        task, slot, drafts = share.task, share.slot, share.drafts
        if task.draft is not None and share.is_answer:
            task.draft.begin_step(len(drafts))
        goes_on = task.take_logits(share.batch_index, answers)
        if not drafts or task.draft is None:
            return goes_on
        accepted = 0
        while goes_on and accepted < len(drafts) and task.tokens[-1] == drafts[accepted]:
            # Before the next token is sampled: its messages count the cells that the answer has so far.
            slot.tokens.append(drafts[accepted])
            task.draft.accept()
            accepted += 1
            goes_on = task.take_logits(share.batch_index + accepted, answers)
        if accepted < len(drafts):
            self._slots.roll_back(slot, share.copy)
        self._slots.checkpoint_if_due(slot, task.tokens, task.checkpoint_positions)
        return goes_on

    def _make_room(self, shares: Sequence[_Share]) -> None:
        """Empty unused slots after llama_decode found no room for a batch in the KV cache (status 1).

        If all slots are in use, the request that got its slot last loses the slot, and starts anew when another request
        has ended. If only one request is running, it fails.
        """
        if self._slots.empty_free():
            return
        if len(self._running) == 1:
            task = shares[0].task
            refused = failure(
                "argument", "The context is full. Start a new conversation, or load with a longer context."
            )
            self._end(task, refused.message_for(task.id))
            return
        youngest = max(self._running, key=lambda task: task.slot.used if task.slot is not None else 0)
        self._running.remove(youngest)
        if youngest.slot is not None:
            self._slots.empty(youngest.slot)
            self._slots.release(youngest.slot)
            youngest.slot = None
        # In front: it came before the requests that wait.
        self._waiting.appendleft(youngest)
        self._crowded = True

    def _recover(self, shares: Sequence[_Share], status: int) -> None:
        """Restore the slots after llama_decode has aborted a batch or failed.

        After a failure, end the requests that may have caused it. `status`: status of llama_decode.
        """
        # After an abort or an error llama.cpp has removed the failed micro batch from the KV cache, and kept the
        # earlier ones (llama_context::decode). A recurrent state was overwritten in place: only a checkpoint is sound.
        final_message = None if status == ABORTED else RequestError(self._loaded.failed_computation(status, self._free))
        if self._loaded.has_recurrent_state:
            self._slots.restore_checkpoints()
        else:
            for share in shares:
                self._slots.reconcile(share.slot, share.task.tokens)
        if final_message is None:
            return  # The stop requests that caused the abort are handled next, and end the tasks.
        # Memory may suffice for the answers without the long prompt. So only tasks that read a prompt are ended, if
        # any.
        readers = [share for share in shares if share.end - share.begin > 1]
        for share in readers or shares:
            self._slots.empty(share.slot)
            self._end(share.task, final_message.message_for(share.task.id))

    # ------------------------------------------------------------------ images and sounds

    def _read_media(self) -> None:
        """Decode the next image or sound part into the KV cache, if one comes next in a running prompt."""
        task = next((task for task in self._running if task.next_chunk is not None), None)
        if task is None or task.slot is None or task.next_chunk is None:
            return
        self._outbox.send()
        slot, part = task.slot, task.next_chunk
        begin = len(slot.tokens)
        share = _Share(task, slot, begin, begin + part.n_positions, -1, part.n_cells)
        self._loaded.log.begin_computation(self._free.note)
        try:
            with self._stop.computing([task.id]):
                status = task.media.read(part, begin, slot.number, self._stop)
        except RequestError as end:
            self._end(task, end.message_for(task.id))
            return
        if status == DECODED:
            self._go_on((share,))
        elif status == NO_SLOT:
            # The part of the image that fitted is removed, and computed again later.
            self._slots.drop_end(slot)
            self._make_room((share,))
        else:
            self._recover((share,), status)

    # ------------------------------------------------------------------ standalone tasks

    def _run_standalone(self) -> None:
        # One part of one task between two batches, in turn, so that answers are not held up.
        self._outbox.send()
        task = self._standalone[0]
        self._standalone.rotate(-1)
        final_message: Message | None
        try:
            with self._stop.computing([task.id]):
                final_message = task.run_slice(self._slots)
        except (RequestError, MemoryError) as end:
            final_message = _failure_of(end, task.id)
        if final_message is not None:
            self._end(task, final_message)
        else:
            self._outbox.send(task.reading)


def share_evenly(room: int, wants: Sequence[int]) -> list[int]:
    """Divide `room` tokens of a batch evenly among requests, and return the number of tokens for each request.

    `wants`: largest number of tokens that each request can use. Tokens that a request cannot use go to the others. As
    long as there is room, each request gets at least 1 token.
    """
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


def _failure_of(error: RequestError | MemoryError, request: int) -> Message:
    """Return the final message of a request that ended with an error. `request`: id of the request."""
    if isinstance(error, MemoryError):
        error = failure("argument", "Host memory is too short for this request. The model stays loaded.")
    return error.message_for(request)


def _slot_number(task: SequenceTask) -> int:
    return -1 if task.slot is None else task.slot.number

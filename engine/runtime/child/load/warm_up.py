"""Progress messages of a load, and its last stage, the warm-up.

The warm-up computes the first batches of a new context. Backends may allocate more memory for these batches. Without
a warm-up, such an allocation could fail in the middle of the first answer.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable

from engine.base.values import replace
from engine.planning.settings.context_settings import ContextSettings
from engine.runtime.child.load.loaded_context import ABORTED, DECODED, Batch, LoadedContext
from engine.runtime.child.native.failures import RequestError, look_at_nodes
from engine.runtime.child.native.log import FailedAllocation, FreeMemory
from engine.runtime.child.native.stop import StopFlag
from engine.runtime.protocol.heartbeat import TICK_SECONDS, WorkHeartbeat
from engine.runtime.protocol.messages import AllocationFailure, LoadStage, Message, StageProgress, Stopped

MIN_STEP = 0.01
MIN_STEP_SECONDS = 0.05


class StageReporter:
    """Sends the stage of a load to the parent when the stage changes.

    The stage is sent again every second while the process's resource use shows that it works. As a context manager the
    reporter stops sending when the block is left. Its methods are thread-safe, because native callbacks and the thread
    of the heartbeat call them too.
    """

    def __init__(self, send: Callable[[Message], None], *, tick_seconds: float = TICK_SECONDS) -> None:
        self._send_message = send
        self._tick_seconds = tick_seconds
        self._lock = threading.Lock()
        self._latest = StageProgress(stage="allocate")
        self._sent_at = 0.0
        self._is_draft = False
        self._as_draft: Callable[[Message], Message] = lambda message: message
        self._ticks = WorkHeartbeat(self._repeat, tick_seconds=tick_seconds)

    @property
    def stage(self) -> LoadStage:
        return self._latest.stage

    def __enter__(self) -> StageReporter:
        self._ticks.__enter__()
        return self

    def __exit__(self, *raised: object) -> None:
        self._ticks.__exit__(*raised)

    def begin_draft(self, as_draft: Callable[[Message], Message]) -> None:
        """Mark all following messages as messages about the draft model, whose load begins now.

        `as_draft`: turns a final message into one about the draft model.
        """
        self._is_draft, self._as_draft = True, as_draft

    def enter(self, stage: LoadStage, fraction: float | None = None) -> None:
        """Begin a stage of the load, and send the stage to the parent."""
        self._send(StageProgress(stage=stage, fraction=fraction))

    def advance(self, fraction: float) -> None:
        """Send the completed fraction of the stage, 0 to 1. Small steps in quick succession are not sent."""
        before = self._latest.fraction or 0.0
        soon = time.monotonic() - self._sent_at < MIN_STEP_SECONDS
        if fraction >= 1.0 or (fraction - before >= MIN_STEP and not soon):
            self._send(StageProgress(stage=self._latest.stage, fraction=fraction, device=self._latest.device))

    def name_device(self, device: str) -> None:
        """Report to the parent the id of the device on which llama.cpp has just allocated a buffer."""
        if device != self._latest.device:
            self._send(StageProgress(stage=self._latest.stage, fraction=self._latest.fraction, device=device))

    def send_final(self, message: Message) -> None:
        """Send the final message of the load, from a callback of a native call that will not return."""
        with self._lock:
            self._send_message(self._as_draft(message))

    def _send(self, progress: StageProgress) -> None:
        with self._lock:
            self._latest = replace(progress, draft=True) if self._is_draft else progress
            self._sent_at = time.monotonic()
            self._send_message(self._latest)

    def _repeat(self) -> None:
        look_at_nodes()
        if time.monotonic() - self._sent_at >= self._tick_seconds / 2:
            with self._lock:
                self._send_message(self._latest)


WARM_UP_SECONDS = 2.0
WARM_UP_GROWTH = 8


class WarmUp:
    """Computes growing batches, up to a full micro batch over all sequences, before the first answer.

    The warm-up ends early if the next batch would make it longer than `WARM_UP_SECONDS`.
    """

    def __init__(self, loaded: LoadedContext, free: FreeMemory, stop: StopFlag, reporter: StageReporter) -> None:
        self._loaded, self._free, self._stop, self._reporter = loaded, free, stop, reporter
        self._before = loaded.parts()

    def run(self, settings: ContextSettings, *, is_known: bool = False) -> None:
        """Warm up a context with these settings.

        `is_known`: whether the same load has succeeded before, so that a batch of one token is enough.

        Raises:
            RequestError: with `AllocationFailure`, `Failure` or `Stopped`.
        """
        self._reporter.enter("warm_up", 0.0)
        loaded = self._loaded
        # A unified KV cache is shared by all sequences; otherwise each has `n_ctx_seq` cells of its own.
        room = loaded.context_tokens * (1 if settings.kv_unified else loaded.n_sequences)
        largest = min(settings.n_ubatch, loaded.batch_tokens, room)
        if loaded.side_files is not None and loaded.side_files.adapters.handles:
            loaded.log.on_failed = self._exit_after_refusal
        if loaded.embeddable_tokens:
            self._reserve_embeddings(loaded.embeddable_tokens)
        if loaded.output_rows > loaded.n_sequences:
            self._reserve_rows(loaded.output_rows, loaded.context_tokens)
        if loaded.makes_text:
            self._compute(1 if is_known else largest)
        loaded.log.on_failed = self._free.note
        self._check_stop()

    def _reserve_embeddings(self, tokens: int) -> None:
        """Make llama.cpp allocate the output buffer for embeddings of `tokens` tokens."""
        loaded, low = self._loaded, self._loaded.engine.low
        low.llama_set_embeddings(loaded.context, True)
        try:
            self._reserve_rows(tokens, loaded.longest_text)
        finally:
            low.llama_set_embeddings(loaded.context, False)
        loaded.embedded_tokens = tokens

    def _reserve_rows(self, rows: int, longest: int) -> None:
        """Make llama.cpp allocate the output buffer for `rows` rows, by computing a batch that is aborted at once.

        A row holds the logits or the embedding of one token.
        `longest`: largest number of tokens of a sequence in that batch.
        """
        loaded = self._loaded
        # Outputs in all rows: llama.cpp sizes the buffer by the outputs of a batch (llama_context::output_reserve).
        batch = loaded.new_batch(rows)
        for sequence, begin in enumerate(range(0, rows, longest)):
            length = min(longest, rows - begin)
            batch.extend([self._token()] * length, 0, sequence, outputs=length)
        self._check_stop()
        # The abort is intended, and its log lines would look like a failure.
        loaded.log.is_mute = True
        try:
            with self._stop.aborting():
                status = loaded.compute(batch.struct)
        finally:
            loaded.log.is_mute = False
        loaded.clear()
        if status not in (DECODED, ABORTED):
            self._raise_failure(status)
        loaded.log.facts.errors.clear()
        self._check_stop()

    def _compute(self, largest: int) -> None:
        """Compute batches of 1, 8, 64... tokens, up to `largest`."""
        loaded = self._loaded
        batch = loaded.new_batch(largest)
        size, spent_seconds = 1, 0.0
        while True:
            self._check_stop()
            self._fill(batch, size)
            started = time.monotonic()
            status = loaded.compute(batch.struct)
            if status != DECODED:
                self._raise_failure(status)
            loaded.clear()
            took_seconds = time.monotonic() - started
            spent_seconds += took_seconds
            self._reporter.advance(size / largest)
            # A batch of 8 times the size is taken to need 8 times as long.
            if size == largest or spent_seconds + took_seconds * WARM_UP_GROWTH > WARM_UP_SECONDS:
                break
            size = min(size * WARM_UP_GROWTH, largest)

    def _fill(self, batch: Batch, size: int) -> None:
        """Fill the batch with `size` tokens, evenly over all sequences, with logits for the last token of each."""
        count = min(size, self._loaded.n_sequences)
        token = self._token()
        batch.clear()
        for sequence in range(count):
            length = size // count + (sequence < size % count)
            batch.extend([token] * length, 0, sequence, outputs=1)

    def _token(self) -> int:
        begin = int(self._loaded.engine.low.llama_vocab_bos(self._loaded.vocabulary))
        return begin if 0 <= begin < self._loaded.vocabulary_size else 0

    def _check_stop(self) -> None:
        if self._stop.requested:
            raise RequestError(Stopped(stage=self._reporter.stage))

    def _raise_failure(self, status: int) -> None:
        loaded = self._loaded
        if status == ABORTED:
            self._check_stop()
        failed = loaded.failed_computation(status, self._free)
        if isinstance(failed, AllocationFailure):
            failed = replace(failed, stage=self._reporter.stage)
        raise RequestError(failed)

    def _exit_after_refusal(self, failed: FailedAllocation) -> None:
        """Report a refused compute buffer and exit the process, unless llama.cpp tries again with a smaller buffer.

        With LoRA adapters the first batch allocates the compute buffers anew. If that allocation fails, llama_decode
        throws a C++ exception, which cannot be caught here.
        """
        self._free.note(failed)
        # llama.cpp first tries again without copies for pipeline parallelism; only the second failure is final.
        log, devices = self._loaded.log, self._loaded.devices
        if log.facts.input_copies > 1:
            log.facts.input_copies = 1
            return
        self._reporter.send_final(
            AllocationFailure(
                stage=self._reporter.stage,
                device=devices.id_of_buffer_name(failed.buffer_type),
                buffer_type=failed.buffer_type,
                requested_bytes=failed.requested_bytes,
                free_bytes=self._free.of(failed.buffer_type),
                parts=self._before,
                text=failed.text,
            )
        )
        os._exit(1)

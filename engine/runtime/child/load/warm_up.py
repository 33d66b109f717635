"""The stages of a load, told also while the engine says nothing for a long time, and the last of them: warming up.

The first batches are computed before anybody waits for an answer: they may make backends allocate more.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from types import TracebackType

import msgspec

from engine.planning.settings.context_settings import ContextSettings
from engine.runtime.child.load.loaded_context import ABORTED, DECODED, Batch, LoadedContext
from engine.runtime.child.native.failures import EndOfRequest
from engine.runtime.child.native.log import FailedAllocation, FreeMemory
from engine.runtime.child.native.stop import StopRequest
from engine.runtime.protocol.effort import TICK_SECONDS, WorkTicks
from engine.runtime.protocol.messages import AllocationFailure, LoadStage, Message, StageProgress, Stopped

MIN_STEP = 0.01
MIN_STEP_SECONDS = 0.05


class StageReporter:
    """The stage a load is in, sent when it changes and repeated every second while the process visibly works.

    Use as a context manager: the ticking ends with it.
    """

    def __init__(self, send: Callable[[Message], None], *, tick_seconds: float = TICK_SECONDS) -> None:
        self._say = send
        self._tick_seconds = tick_seconds
        self._lock = threading.Lock()
        self._latest = StageProgress(stage="allocate")
        self._sent_at = 0.0
        self._ticks = WorkTicks(self._repeat, tick_seconds=tick_seconds)

    @property
    def stage(self) -> LoadStage:
        return self._latest.stage

    def __enter__(self) -> StageReporter:
        self._ticks.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ticks.__exit__(kind, error, trace)

    def enter(self, stage: LoadStage, fraction: float | None = None) -> None:
        """Begin a stage."""
        self._send(StageProgress(stage=stage, fraction=fraction))

    def advance(self, fraction: float) -> None:
        """Tell how much of the stage is done, 0..1; small steps in quick succession are left out."""
        before = self._latest.fraction or 0.0
        soon = time.monotonic() - self._sent_at < MIN_STEP_SECONDS
        if fraction >= 1.0 or (fraction - before >= MIN_STEP and not soon):
            self._send(StageProgress(stage=self._latest.stage, fraction=fraction, device=self._latest.device))

    def name_device(self, device: str) -> None:
        """Tell that the stage is at work on a device (our id)."""
        if device != self._latest.device:
            self._send(StageProgress(stage=self._latest.stage, fraction=self._latest.fraction, device=device))

    def say_last(self, message: Message) -> None:
        """Send the message that ends the load, from within a native call that will not return."""
        with self._lock:
            self._say(message)

    def _send(self, progress: StageProgress) -> None:
        with self._lock:
            self._latest = progress
            self._sent_at = time.monotonic()
            self._say(progress)

    def _repeat(self) -> None:
        if time.monotonic() - self._sent_at >= self._tick_seconds / 2:
            with self._lock:
                self._say(self._latest)


WARM_UP_SECONDS = 2.0
WARM_UP_GROWTH = 8


class WarmUp:
    """Computes batches that grow up to a full micro batch, of all sequences that requests may have at a time.

    Ends early where the next step would take longer than a user should wait for it.
    """

    def __init__(self, loaded: LoadedContext, free: FreeMemory, stop: StopRequest, reporter: StageReporter) -> None:
        self._loaded, self._free, self._stop, self._reporter = loaded, free, stop, reporter
        self._before = loaded.parts()

    def run(self, settings: ContextSettings) -> None:
        """Warm up a context with these settings.

        Raises:
            EndOfRequest: with `AllocationFailure`, `Failure` or `Stopped`.
        """
        self._reporter.enter("warm_up", 0.0)
        loaded = self._loaded
        room = loaded.context_tokens * (1 if settings.kv_unified else loaded.n_sequences)
        largest = min(settings.n_ubatch, loaded.batch_tokens, room)
        if loaded.side_files is not None and loaded.side_files.adapters.handles:
            loaded.log.on_failed = self._end_unmade
        if loaded.embeddable_tokens:
            self._reserve_embeddings(loaded.embeddable_tokens)
        if loaded.makes_text:
            self._compute(largest)
        loaded.log.on_failed = self._free.note
        self._check_stop()

    def _reserve_embeddings(self, tokens: int) -> None:
        """Have the engine allocate all that embedding takes: only a batch of texts makes it do so."""
        loaded, low = self._loaded, self._loaded.engine.low
        batch, longest = Batch(loaded.engine, tokens), loaded.longest_text
        for sequence, begin in enumerate(range(0, tokens, longest)):
            length = min(longest, tokens - begin)
            batch.extend([self._token()] * length, 0, sequence, outputs=length)
        self._check_stop()
        low.llama_set_embeddings(loaded.context, True)
        loaded.log.is_mute = True
        try:
            with self._stop.breaking_off():
                status = loaded.compute(batch.struct)
        finally:
            loaded.log.is_mute = False
            low.llama_set_embeddings(loaded.context, False)
        loaded.clear()
        if status not in (DECODED, ABORTED):
            self._raise_failure(status)
        loaded.log.facts.errors.clear()
        loaded.embedded_tokens = tokens
        self._check_stop()

    def _compute(self, largest: int) -> None:
        """Compute batches of growing size."""
        loaded = self._loaded
        batch = Batch(loaded.engine, largest)
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
            if size == largest or spent_seconds + took_seconds * WARM_UP_GROWTH > WARM_UP_SECONDS:
                break
            size = min(size * WARM_UP_GROWTH, largest)

    def _fill(self, batch: Batch, size: int) -> None:
        """Put `size` tokens into the batch, as many of each sequence as can be: an answer to each ends in one."""
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
            raise EndOfRequest(Stopped(stage=self._reporter.stage))

    def _raise_failure(self, status: int) -> None:
        loaded = self._loaded
        if status == ABORTED:
            self._check_stop()
        failed = loaded.failed_computation(status, self._free)
        if isinstance(failed, AllocationFailure):
            failed = msgspec.structs.replace(failed, stage=self._reporter.stage)
        raise EndOfRequest(failed)

    def _end_unmade(self, failed: FailedAllocation) -> None:
        """Say which buffer was refused, and end the process.

        With adapters the first batch makes the compute buffers anew, and the engine answers a refusal with a C++
        exception that nobody can catch. It first does without copies for a pipeline.
        """
        self._free.note(failed)
        log, devices = self._loaded.log, self._loaded.devices
        if log.facts.input_copies > 1:
            log.facts.input_copies = 1
            return
        self._reporter.say_last(
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

"""A model child at the level of its pipes, for events between a request and its answer, and for a sudden end."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager

import msgspec

from engine.planning.layout.engine_parameters import MAX_DEVICES, EngineParameters
from engine.planning.settings.sampling_settings import SamplingSettings
from engine.runtime.protocol.messages import (
    AllocationFailure,
    AnyMessage,
    Failure,
    FinalMessage,
    Generated,
    Hello,
    Piece,
    Reading,
    Saving,
    Serving,
    Shifted,
    StageProgress,
)
from engine.runtime.protocol.requests import SERVE_ENVIRONMENT, AnyRequest, DeviceRef, Generate, Serve
from tests.support.patience import DEADLINE_S


def endless(number: int, prompt: str, *, seed: int = 1) -> Generate:
    """Return a request whose answer ends only when it is stopped, however late that is."""
    sampling = SamplingSettings(seed=seed, temperature=1.0, min_p=0.0, full_context="shift", repetition="continue")
    return Generate(id=number, prompt=prompt, sampling=sampling)


class RawChild:
    """A child as a context manager; one that is silent for `DEADLINE_S` is killed, which ends the reading.

    `own_group`: it leads a group of processes, as it does for the app. `command`: module and arguments of the child.
    """

    def __init__(self, *, own_group: bool = False, command: Sequence[str] = ("engine.runtime.child",)) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", *command],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={**os.environ, **SERVE_ENVIRONMENT},
            start_new_session=own_group,
        )
        self._decoder: msgspec.json.Decoder[AnyMessage] = msgspec.json.Decoder(AnyMessage)
        self.heard: list[AnyMessage] = []

    def __enter__(self) -> RawChild:
        assert isinstance(self.message(), Hello)
        return self

    def __exit__(self, *_: object) -> None:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.close()
        self.process.stdout.close()
        self.ended()

    def send(self, *requests: AnyRequest) -> None:
        """Send requests in one write, so that the child has all of them when it looks."""
        assert self.process.stdin is not None
        self.process.stdin.write(b"".join(msgspec.json.encode(request) + b"\n" for request in requests))
        self.process.stdin.flush()

    def message(self) -> AnyMessage | None:
        """Return the next message, None when the process has ended."""
        assert self.process.stdout is not None
        watch = threading.Timer(DEADLINE_S, self.process.kill)
        watch.start()
        try:
            line = self.process.stdout.readline()
        finally:
            watch.cancel()
            watch.join()
        return self._decoder.decode(line) if line else None

    def answer(self) -> AnyMessage | None:
        """Return the next message that is neither progress nor a piece of text; those are in `heard`."""
        self.heard = []
        while isinstance(message := self.message(), StageProgress | Reading | Saving | Piece | Shifted):
            self.heard.append(message)
        return message

    def ask(self, request: AnyRequest) -> AnyMessage | None:
        self.send(request)
        return self.answer()

    def generated(self, request: Generate) -> tuple[str, Generated]:
        """Return the text of an answer, and its last message."""
        done = self.ask(request)
        assert isinstance(done, Generated), done
        return "".join(each.text for each in self.heard if isinstance(each, Piece)), done

    def last_words(self, *requests: int) -> dict[int, list[AnyMessage]]:
        """Listen until each of these requests has had its last word; return what was said about each, in order."""
        said: dict[int, list[AnyMessage]] = {request: [] for request in requests}
        waiting = set(requests)
        self.heard = []
        while waiting:
            message = self.message()
            assert message is not None, f"the child ended while {waiting} were under way"
            self.heard.append(message)
            request = getattr(message, "request", None)
            if request in said:
                assert request in waiting, f"{message} came after the last word"
                said[request].append(message)
                if isinstance(message, FinalMessage | Failure | AllocationFailure):
                    waiting.discard(request)
        return said

    def ended(self) -> int:
        """Wait for the end and return the exit status, negative for a signal."""
        try:
            return self.process.wait(DEADLINE_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
            raise AssertionError("the child did not end") from None


@contextmanager
def rpc_workers(*caps_bytes: int | None) -> Iterator[tuple[list[RawChild], tuple[DeviceRef, ...]]]:
    """Local RPC workers `W0`, `W1`... with these caps, and how to find them."""
    with ExitStack() as stack:
        workers = [stack.enter_context(RawChild()) for _ in caps_bytes]
        refs = []
        for number, (worker, cap_bytes) in enumerate(zip(workers, caps_bytes, strict=True)):
            served = worker.ask(Serve(host="127.0.0.1", port=0, cap_bytes=cap_bytes))
            assert isinstance(served, Serving), served
            refs.append(DeviceRef(id=f"W{number}", backend="RPC", endpoint=f"127.0.0.1:{served.port}"))
        yield workers, tuple(refs)


def entries(*runs: tuple[str, int]) -> EngineParameters:
    """Parameters for runs (device, positions); the output is the last position, the CPU has those before the runs."""
    counts: Sequence[float] = [float(count) for _, count in runs]
    return EngineParameters(
        n_gpu_layers=sum(count for _, count in runs),
        devices=tuple(device for device, _ in runs),
        tensor_split=(*counts, *[0.0] * (MAX_DEVICES - len(counts))),
        split_mode="layer",
    )

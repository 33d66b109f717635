"""Time to continue a conversation of 4,096 tokens: its saved KV state is restored, or the prompt is evaluated again.

    python -m benchmarks.kept_state [--model FILE.gguf] [--tokens 4096] [--rounds 3] [--threads N]

A model child on the CPU does both in each round. Measured is the wall-clock time from the request to the first token of
the answer, in the parent process. Printed are median seconds of both (`read_s`, `restored_s`), their ratio
(`times_faster`), and the size of the saved state. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from itertools import count
from pathlib import Path

from benchmarks._children import OurChild, load_request, our_child, usable_processors, write_model
from engine.runtime.protocol.messages import (
    Generated,
    Hello,
    LoadedModel,
    Piece,
    SequenceRestored,
    SequenceSaved,
    Tokenised,
)
from engine.runtime.protocol.requests import AnyRequest, Generate, RestoreSequence, SaveSequence, Tokenise

TEXT = "The layers of a model are places where it keeps what it has read. "
ROOM_TOKENS = 256

_numbers = count(1)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", type=Path)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=usable_processors())
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        path = options.model or write_model(Path(folder) / "state.gguf", n_layers=8, n_embd=512, n_ff=1536)
        state = Path(folder) / "conversation.state"
        with our_child() as child:
            assert isinstance(child.message(), Hello)
            child.send(
                load_request(path, load_mode="none", n_ctx=options.tokens + ROOM_TOKENS, threads=options.threads)
            )
            _wait(child, LoadedModel)
            prompt = _prompt(child, options.tokens)
            read: list[float] = []
            restored: list[float] = []
            for _ in range(options.rounds):
                _ask(child, Generate(id=next(_numbers), prompt="?", max_tokens=1), Generated)
                seconds, number = _first_token(child, prompt)
                read.append(seconds)
                saved = _ask(child, SaveSequence(id=next(_numbers), path=str(state), of=number), SequenceSaved)
                _ask(child, Generate(id=next(_numbers), prompt="?", max_tokens=1), Generated)
                begun = time.perf_counter()
                _ask(child, RestoreSequence(id=next(_numbers), path=str(state)), SequenceRestored)
                restore_seconds = time.perf_counter() - begun
                restored.append(restore_seconds + _first_token(child, prompt)[0])
                print(f"read {read[-1]:.2f} s, restored {restored[-1]:.3f} s", flush=True)
            assert isinstance(saved, SequenceSaved)
    result = {
        "benchmark": "kept_state",
        "tokens": saved.tokens,
        "size_bytes": saved.size_bytes,
        "read_s": round(statistics.median(read), 3),
        "restored_s": round(statistics.median(restored), 3),
        "times_faster": round(statistics.median(read) / statistics.median(restored), 1),
        "threads": options.threads,
    }
    print(json.dumps(result))


def _prompt(child: OurChild, tokens: int) -> str:
    """Return a text of about `tokens` tokens."""
    told = _ask(child, Tokenise(id=next(_numbers), text=TEXT), Tokenised)
    assert isinstance(told, Tokenised)
    return TEXT * (tokens // len(told.tokens))


def _first_token(child: OurChild, prompt: str) -> tuple[float, int]:
    """Send a prompt; return the seconds until the first token of the answer, and the number of the request."""
    number = next(_numbers)
    begun = time.perf_counter()
    child.send(Generate(id=number, prompt=prompt, max_tokens=1, temperature=0.0))
    seconds = 0.0
    while not isinstance(message := child.message(), Generated):
        if isinstance(message, Piece):
            seconds = time.perf_counter() - begun
    return seconds or time.perf_counter() - begun, number


def _ask(child: OurChild, request: AnyRequest, kind: type) -> object:
    child.send(request)
    return _wait(child, kind)


def _wait(child: OurChild, kind: type) -> object:
    """Return the next message of type `kind`.

    Raises:
        RuntimeError: the child reports a failure before it.
    """
    while not isinstance(message := child.message(), kind):
        if type(message).__name__ in ("Failure", "AllocationFailure"):
            raise RuntimeError(str(message))
    return message


if __name__ == "__main__":
    main()

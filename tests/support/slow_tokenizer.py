"""A model child whose `Tokenise` computes until the child has sent a sign of life, as for a very long text.

`python -m tests.support.slow_tokenizer`
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable

from engine.runtime.child import __main__ as child
from engine.runtime.child.generate.outbox import Outbox
from engine.runtime.child.handlers import texts
from engine.runtime.protocol.messages import Reading


def main() -> None:
    told = threading.Event()
    tokenise, send_reading = texts.tokenise, Outbox.send_reading

    def send(outbox: Outbox, readings: Callable[[], Iterable[Reading]]) -> None:
        send_reading(outbox, readings)
        told.set()

    def compute(*arguments: object) -> object:
        # With processor time, which the heartbeat looks at.
        while not told.is_set():
            pass
        return tokenise(*arguments)  # type: ignore[arg-type]

    Outbox.send_reading = send  # type: ignore[assignment, method-assign]
    texts.tokenise = compute  # type: ignore[assignment]
    child.main()


if __name__ == "__main__":
    main()

"""Time of the database of conversations: opening, searching, appending and copying, with 10,000 conversations.

    python -m benchmarks.chat_store [--conversations N]

One of the conversations has 1,000 messages. Times are milliseconds of the wall clock:

`open_ms`: opening the store, listing all conversations and reading the long one; median.
`search_ms`: the slowest of several searches, among them short texts; median of each.
`append_ms`, `append_slowest_ms`: from the call with a piece of an answer until it is on disk; median and slowest.
`append_call_ms`: how long that call blocks its caller; median.
`copy_ms`: a backup copy of the database, once.
`append_slowest_during_copy_ms`: the slowest piece that was written during the copy.

The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from engine.chat.conversation import Conversation
from engine.chat.copies import DatabaseCopies
from engine.chat.message import Message, Role
from engine.chat.store import ChatStore
from engine.chat.tree import MessageTree, add, tree_of

REPEATS = 5
LONG_MESSAGES = 1000
WORDS_OF_MESSAGE = 60
TEXTS = ("needle in a haystack", "conversation", "def function", "wo", "z9", "q", "日本", "not there at all")
PIECES = 200
PIECES_PER_SECOND = 200


def main() -> None:
    """Fill a database, measure and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--conversations", type=int, default=10_000)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "chats.sqlite"
        _fill(path, options.conversations)
        opened = _median(lambda: _open(path))
        store = ChatStore(path, makes_copies=False)
        searches = {text: _median(lambda text=text: store.search(text)) for text in TEXTS}  # type: ignore[misc]
        for text, milliseconds in searches.items():
            print(f"search {text!r}: {milliseconds:.1f} ms, {len(store.search(text))} found", flush=True)
        appended, calls = _append(store)
        copied, beside_copy = _copy(store)
        size_bytes = path.stat().st_size
        store.close()
    result = {
        "benchmark": "chat_store",
        "conversations": options.conversations,
        "size_bytes": size_bytes,
        "open_ms": round(opened, 1),
        "search_ms": round(max(searches.values()), 1),
        "append_ms": round(statistics.median(appended), 2),
        "append_slowest_ms": round(max(appended), 2),
        "append_call_ms": round(statistics.median(calls), 4),
        "copy_ms": round(copied, 1),
        "append_slowest_during_copy_ms": round(max(beside_copy), 2),
    }
    print(json.dumps(result))


def _fill(path: Path, count: int) -> None:
    draw = random.Random(1)
    words = ["".join(draw.choices("abcdefghijklmnopqrstuvwxyz", k=draw.randint(2, 9))) for _ in range(20_000)]
    store = ChatStore(path)
    last = None
    for number in range(count):
        ident, length = f"c{number}", LONG_MESSAGES if number == count // 2 else 4
        store.save(Conversation(id=ident, title=f"Conversation {number}", created_ms=number, updated_ms=number))
        messages: list[Message] = []
        for place in range(length):
            text = " ".join(draw.choices(words, k=WORDS_OF_MESSAGE))
            if (number, place) == (7, 1):
                text += " a needle in a haystack 日本語 z9"
            role: Role = "user" if place % 2 == 0 else "assistant"
            messages.append(
                Message(id=f"{ident}.{place}", role=role, content=text, parent=messages[-1].id if messages else None)
            )
        last = store.apply(ident, MessageTree(), tree_of(messages, messages[-1].id))
    if last is not None:
        last.result()
    store.close()


def _open(path: Path) -> None:
    store = ChatStore(path)
    listed = store.conversations()
    tree = store.tree(f"c{len(listed) // 2}")
    assert len(tree.path) == LONG_MESSAGES
    store.close()


def _append(store: ChatStore) -> tuple[list[float], list[float]]:
    """Append pieces to an answer.

    Return two times for each piece, in milliseconds: until it is on disk, and how long the call blocked its caller.
    """
    tree = store.tree("c1")
    answer = Message(id="new", role="assistant", content="", parent=tree.leaf, state="writing")
    store.apply("c1", tree, add(tree, answer)).result()
    kept: list[float] = []
    calls: list[float] = []
    for _ in range(PIECES):
        begun = time.perf_counter()
        done = store.append("new", content="piece ")
        calls.append(1000 * (time.perf_counter() - begun))
        done.add_done_callback(lambda _done, begun=begun: kept.append(1000 * (time.perf_counter() - begun)))  # type: ignore[misc]
        time.sleep(1 / PIECES_PER_SECOND)
    store.finish("c1", answer).result()
    return kept, calls


def _copy(store: ChatStore) -> tuple[float, list[float]]:
    """Copy the database while pieces are written.

    Return the milliseconds of the copy, and the milliseconds that each piece took.
    """
    copies = DatabaseCopies(store.path)
    kept: list[float] = []
    begun = time.perf_counter()
    with ThreadPoolExecutor(1) as pool:
        copying = pool.submit(copies.make)
        while not copying.done() or not kept:
            asked = time.perf_counter()
            store.append("new", content="piece ").result()
            kept.append(1000 * (time.perf_counter() - asked))
        copying.result()
    return 1000 * (time.perf_counter() - begun), kept


def _median(work: Callable[[], object]) -> float:
    times = []
    for _ in range(REPEATS):
        begun = time.perf_counter()
        work()
        times.append(1000 * (time.perf_counter() - begun))
    return statistics.median(times)


if __name__ == "__main__":
    main()

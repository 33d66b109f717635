"""Memory of the window's process during a chat: after the start, with a long conversation open, and after an answer.

    python -m benchmarks.chat_memory [--messages 1000] [--conversations 1000]

The whole window runs in this process, without a model. Printed are megabytes:

`started_mb`: resident, with an empty chat.
`open_mb`: resident, after a conversation of `--messages` messages was scrolled from its end to its beginning.
`streamed_mb`: resident, after an answer of 2,000 pieces.
`private_mb`: memory at the end that is not shared with other processes (USS).

Goal: less than 350 MB resident at all three moments (`met`). The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
from collections.abc import Callable
from itertools import cycle
from pathlib import Path

import psutil

GOAL_MB = 350.0
PIECES = 2_000
SIZE = 1440, 900
MB = 1_000_000


def main() -> None:
    """Measure and print."""
    options = _parse()
    os.environ.setdefault("QT_QPA_PLATFORM", "offscreen")
    with tempfile.TemporaryDirectory() as home:
        for name in ("CONFIG", "DATA", "STATE", "CACHE"):
            os.environ[f"XDG_{name}_HOME"] = home
        print(json.dumps(_measure(Path(home), options.messages, options.conversations)))


def _measure(home: Path, n_messages: int, n_conversations: int) -> dict[str, float | bool]:
    from PySide6.QtCore import QEvent
    from PySide6.QtWidgets import QApplication

    from app.settings import Settings
    from app.theme import Theme
    from app.wiring import make_window
    from benchmarks.chat_view import ANSWER, settle
    from engine.chat.conversation import Conversation
    from engine.chat.message import Message
    from engine.chat.tree import tree_of

    application = QApplication([])
    window = make_window(Settings(home / "settings.ini"), Theme(application, "light"))
    window.main.resize(*SIZE)
    window.main.show()
    window.desk.archive.start()
    window.desk.typesetter.warm_up()
    window.actions["arrange_chat"].trigger()
    settle(application, 3.0)
    started_mb = _resident_mb()

    for number in range(n_conversations):
        chat = Conversation(id=f"c{number}", title=f"Conversation {number}", created_ms=number, updated_ms=number)
        window.desk.archive.save(chat, None)
    ids = [str(number) for number in range(n_messages)]
    texts = cycle(("What is a layer, and where does it go?", ANSWER))
    tree = tree_of(
        [
            Message(
                id=each,
                role="assistant" if place % 2 else "user",
                content=text,
                parent=ids[place - 1] if place else None,
            )
            for place, (each, text) in enumerate(zip(ids, texts, strict=False))
        ],
        ids[-1],
    )
    window.desk.models.current.conversation.open(Conversation(id="long", title="Long"), tree)

    def turn() -> None:
        application.processEvents()
        # no loop runs here that would do it
        application.sendPostedEvents(None, QEvent.Type.DeferredDelete)

    view = window.views.current.chat.message_list
    bar = view.verticalScrollBar()
    settle(application)
    while bar.value() > 0:
        bar.setValue(bar.value() - view.viewport().height())
        _until_drawn(turn, view.bubbles)
    settle(application)
    open_mb = _resident_mb()

    view.scroll_to_end()
    for number in range(PIECES):
        view.append(ids[-1], ANSWER[4 * number % len(ANSWER) :][:4])
        turn()
    settle(application)
    streamed_mb = _resident_mb()
    private_mb = psutil.Process().memory_full_info().uss / MB
    window.main.close()
    return {
        "started_mb": round(started_mb, 1),
        "open_mb": round(open_mb, 1),
        "streamed_mb": round(streamed_mb, 1),
        "private_mb": round(private_mb, 1),
        "met": max(started_mb, open_mb, streamed_mb) < GOAL_MB,
    }


def _until_drawn(turn: Callable[[], None], bubbles: Callable[[], tuple[object, ...]]) -> None:
    turn()
    while not all(bubble.view.live.is_drawn for bubble in bubbles()):  # type: ignore[attr-defined]
        turn()


def _resident_mb() -> float:
    return float(psutil.Process().memory_info().rss / MB)


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--messages", type=int, default=1000, help="in the open conversation")
    parser.add_argument("--conversations", type=int, default=1000, help="in the list")
    return parser.parse_args()


if __name__ == "__main__":
    main()

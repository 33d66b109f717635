"""Speed of the chat view: opening a conversation of 1,000 messages, streaming an answer, and turns of the event loop.

    python -m benchmarks.chat_view [--seconds 10] [--rate 200] [--conversations 10000]

Everything runs in the GUI thread of this process. Printed are milliseconds:

`open_ms`: wall clock from the call that opens the conversation to its first complete picture. Goal: 150.
`open_thread_ms`: processor time of the GUI thread for that.
`token_ms`: processor time of the GUI thread for each streamed token. Goal: 2.
`frame_ms`: longest wall-clock time between two turns of the event loop while the answer streams. Goal: 50.
`unit_ms`: a fixed piece of work (`benchmarks.drag_time`), to compare machines of different speed.
`turns_ms`: for each action in the whole window with `--conversations` stored conversations, the longest turn of the
event loop, in processor time of the GUI thread (`benchmarks._chat_window`). Goal: 50 each.

`met` is true if all goals are met. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from functools import cache
from itertools import cycle
from typing import TYPE_CHECKING

from engine.runtime.media.images.formula import FormulaProcess

if TYPE_CHECKING:
    from widgets.markdown.formulas import Formula, FormulaKey

GOAL_OPEN_MS, GOAL_TOKEN_MS, GOAL_FRAME_MS = 150.0, 2.0, 50.0
"""`GOAL_FRAME_MS` is also the limit for each turn of the whole window's event loop."""
MESSAGES = 1_000
WIDTH, HEIGHT = 900, 900

ANSWER = '''## How layers are placed

A layer is **one step** of a transformer, and `n_gpu_layers` says how many of them go to the card. The cost of attention
is $\\mathcal{O}(n^2)$, so a long context takes more than its share:

1. weights, which are read for every token
2. the cache of keys and values, which grows with the context
   - with each token by the same amount
   - less where it is quantised

| device | memory | layers |
|:--|--:|--:|
| CUDA0 | 24 GiB | 0 to 30 |
| CPU | 64 GiB | 31 to 39 |

```python
def place(layers: int, devices: list[str]) -> dict[str, int]:
    """Split evenly."""
    share = layers // len(devices)
    return {name: share for name in devices}
```

> What does not fit is said before it is loaded.

$$\\sum_{i=1}^{n} w_i \\le M$$

'''


def main() -> None:
    """Measure and print."""
    options = _parse()
    os.environ.setdefault("QT_QPA_PLATFORM", "offscreen")
    with tempfile.TemporaryDirectory() as home:
        for name in ("CONFIG", "DATA", "STATE", "CACHE"):
            os.environ[f"XDG_{name}_HOME"] = home
        print(json.dumps(_measure(options)))


@cache
def _formulas() -> FormulaProcess:
    return FormulaProcess()


def _draw_formula(key: FormulaKey) -> Formula | None:
    from widgets.markdown.formulas import Formula

    drawn = _formulas().draw(key.source, is_display=key.is_display, colour=key.colour)
    if drawn is None:
        return None
    return Formula(drawn.svg.encode(), drawn.width_px, drawn.height_px, drawn.depth_px)


def _measure(options: argparse.Namespace) -> dict[str, object]:
    from PySide6.QtWidgets import QApplication

    from app.background import Worker
    from app.theme import Theme
    from benchmarks import _chat_window
    from benchmarks.drag_time import unit_milliseconds
    from widgets.chat.message_list import MessageList
    from widgets.chat.shown import ShownMessage
    from widgets.markdown.typesetter import Typesetter

    application = QApplication([])
    theme = Theme(application, "light")
    parse, draw = Worker("parse"), Worker("draw")
    typesetter = Typesetter(parse.submit, draw.submit, draw_formula=_draw_formula)
    typesetter.apply_palette(theme.palette)
    typesetter.warm_up()
    messages = [
        ShownMessage(str(number), "assistant" if number % 2 else "user", "Demo" if number % 2 else "You", text)
        for number, text in zip(
            range(MESSAGES), cycle(("What is a layer, and where does it go?", ANSWER)), strict=False
        )
    ]
    view = MessageList(typesetter)
    view.resize(WIDTH, HEIGHT)
    view.show()
    view.set_messages(messages[:2])
    settle(application)

    begun, used = time.perf_counter(), time.thread_time()
    view.set_messages(messages)
    view.grab()
    while not all(bubble.view.live.is_drawn for bubble in view.bubbles()):
        application.processEvents()
    view.grab()
    open_ms, open_thread_ms = (time.perf_counter() - begun) * 1000, (time.thread_time() - used) * 1000
    settle(application)

    view.set_messages([*messages, ShownMessage("new", "assistant", "Demo", "", is_open=True)])
    pieces = cycle(ANSWER[place : place + 4] for place in range(0, len(ANSWER), 4))
    count, longest = 0, 0.0
    used = time.thread_time()
    begun = last = time.perf_counter()
    while last - begun < options.seconds:
        while count < (last - begun) * options.rate:
            view.append("new", next(pieces))
            count += 1
        application.processEvents()
        now = time.perf_counter()
        longest = max(longest, now - last)
        time.sleep(max(0.0, 0.002 - (now - last)))
        last = time.perf_counter()
    token_ms = (time.thread_time() - used) * 1000 / max(count, 1)
    view.close()
    turns_ms = _chat_window.measure(application, theme, options.conversations)
    result = {
        "open_ms": round(open_ms, 1),
        "open_thread_ms": round(open_thread_ms, 1),
        "token_ms": round(token_ms, 3),
        "frame_ms": round(longest * 1000, 1),
        "tokens": count,
        "unit_ms": round(unit_milliseconds(), 2),
    }
    met = open_ms <= GOAL_OPEN_MS and token_ms <= GOAL_TOKEN_MS and result["frame_ms"] <= GOAL_FRAME_MS
    return {**result, "turns_ms": turns_ms, "met": met and max(turns_ms.values()) <= GOAL_FRAME_MS}


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seconds", type=float, default=10.0, help="how long the answer streams")
    parser.add_argument("--rate", type=float, default=200.0, help="tokens a second")
    parser.add_argument("--conversations", type=int, default=10_000, help="in the whole window")
    return parser.parse_args()


def settle(application: object, seconds: float = 0.5) -> None:
    """Process events for `seconds`, so that pending work of the window is done."""
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        application.processEvents()  # type: ignore[attr-defined]
        time.sleep(0.005)


if __name__ == "__main__":
    main()

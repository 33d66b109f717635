"""Time of library scans: 500 models for the first time and known ones again, and 10,000 files in the window's list.

    python -m benchmarks.library_scan [--models 500] [--many 10000] [--tokens 32000]

The models are headers with holes in place of weights; those of `--many` have no vocabulary. All files are in the page
cache. Times are by the wall clock:

`look_ms`, `headers_s`, `first_scan_s`: a first scan: listing files, reading headers, and both with all the rest.
`known_list_ms`: the list of known models from the index; best of 3.
`many_look_s`, `many_headers_s`: listing and reading the many files, beside the window.
`longest_pause_ms`: longest time between turns of the window's event loop meanwhile.
`show_ms`, `key_ms`, `search_ms`: showing the list, one letter typed into the search, and one filtered and sorted list.

The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
from collections.abc import Callable
from contextlib import closing
from functools import partial
from pathlib import Path
from time import perf_counter

from engine.base.cancellation import CancelToken
from engine.library.facts import Facts
from engine.library.grouping import group
from engine.library.index import LibraryIndex
from engine.library.listed import Listed, ListFilter, arrange, listed
from engine.library.refresh import current_facts, list_models, read_missing, rescan, unread
from engine.library.stores import Store
from engine.model.demo.llama_writer import LlamaShape, byte_vocabulary, write_llama

_SHAPE = LlamaShape(n_layers=32, n_embd=4096, n_head=32, n_head_kv=8, n_ff=14336, n_ctx_train=131072)
_NAME = b"model-with-a-name"
_TAGS = ("Q4_K_M", "Q8_0")
_PAUSE_MS = 5


def fill(folder: Path, n_files: int, n_tokens: int | None) -> None:
    """Write `n_files` files, 20 in each folder; each model has two quantisations.

    `n_tokens`: size of the vocabulary; None: the smallest one.
    """
    first = folder / "first.bin"
    folder.mkdir(parents=True)
    write_llama(first, _SHAPE, byte_vocabulary(n_tokens), name=_NAME.decode(), weights=None)
    size_bytes = first.stat().st_size
    with first.open("rb") as file:
        header = file.read(2_000_000 if n_tokens else 100_000)
    first.unlink()
    for number in range(n_files):
        name = f"m-{number // len(_TAGS):07d}-{_TAGS[number % len(_TAGS)]}"
        home = folder / f"publisher-{number // 20:04d}"
        home.mkdir(exist_ok=True)
        with (home / f"{name}.gguf").open("wb") as file:
            file.write(header.replace(_NAME, name.encode().ljust(len(_NAME), b"x")[: len(_NAME)]))
            # Sizes differ, as those of real files do.
            file.truncate(size_bytes + 4096 * number)


def _seconds(action: Callable[[], object]) -> float:
    start = perf_counter()
    action()
    return perf_counter() - start


def measure_first(folder: Path, data: Path) -> dict[str, float]:
    """Return the times of a first scan of `folder`, and of a later list from the index. `data`: path of the index."""
    store = Store("folder", folder)
    with closing(LibraryIndex(data)) as index:
        start = perf_counter()
        census, _ = rescan(index, [store])
        group(census.files, {})
        looked_s = perf_counter() - start
        facts: dict[Path, Facts] = {}
        read_missing(index, census, unread(census, {}), facts.__setitem__, CancelToken())
        headers_s = perf_counter() - start - looked_s
        list_models(census.files, facts, index.notes(), {})
        whole_s = perf_counter() - start

    def known() -> None:
        with closing(LibraryIndex(data)) as index:
            census = index.census()
            list_models(census.files, current_facts(census, index.facts()), index.notes(), index.fits(""))

    return {
        "files": len(census.files),
        "look_ms": round(looked_s * 1e3, 1),
        "headers_s": round(headers_s, 2),
        "first_scan_s": round(whole_s, 2),
        "known_list_ms": round(min(_seconds(known) for _ in range(3)) * 1e3, 1),
    }


def measure_window(folder: Path, data: Path) -> dict[str, float]:
    """Return the times of scans beside the window, its longest pause, and the times for showing and searching."""
    os.environ.setdefault("QT_QPA_PLATFORM", "offscreen")
    from PySide6.QtCore import QEventLoop, QTimer
    from PySide6.QtWidgets import QApplication

    from app.background import Background
    from app.library.catalogue import LibraryCatalogue, LibraryContents
    from widgets.library.library_view import LibraryView

    application = QApplication.instance() or QApplication([])
    view, background, catalogue = LibraryView(), Background(), LibraryCatalogue(data, lambda: [Store("folder", folder)])
    view.resize(1920, 1080)
    view.show()
    last = perf_counter()
    pauses: list[float] = []

    def beat() -> None:
        nonlocal last
        now = perf_counter()
        pauses.append(now - last)
        last = now

    timer = QTimer()
    timer.timeout.connect(beat)
    timer.start(_PAUSE_MS)
    shown: list[float] = []

    def show(shelf: LibraryContents) -> None:
        shown.append(_seconds(lambda: view.show_models(shelf.models)))

    def wait(work: Callable[[], LibraryContents]) -> float:
        done: list[LibraryContents] = []
        start = perf_counter()

        def answer(shelf: LibraryContents) -> None:
            show(shelf)
            done.append(shelf)

        background.run("work", work, answer, lambda error: print(error.summary()))
        while not done:
            # Waiting as a window does: a thread that asks again and again would keep the others from running.
            application.processEvents(QEventLoop.ProcessEventsFlag.WaitForMoreEvents)
        return perf_counter() - start

    def look_once() -> LibraryContents:
        catalogue.scan()
        return catalogue.contents()

    def read_all() -> LibraryContents:
        catalogue.read_headers(lambda _done, _all: None, CancelToken())
        return catalogue.contents()

    look_s, read_s = wait(look_once), wait(read_all)
    keys = [_seconds(partial(view.filters.search_edit.setText, text)) for text in ("m", "m-", "m-00", "")]
    application.processEvents()
    catalogue.close()
    background.close()
    view.close()
    return {
        "many_look_s": round(look_s, 2),
        "many_headers_s": round(read_s, 2),
        "longest_pause_ms": round(max(pauses) * 1e3),
        "show_ms": round(max(shown) * 1e3, 1),
        "key_ms": round(max(keys) * 1e3, 1),
    }


def measure_arranging(models: list[Listed]) -> float:
    """Return the milliseconds of one search with sorting over `models`; best of 3."""
    return round(
        min(_seconds(lambda: arrange(models, ListFilter(text="m-0", order="size"))) for _ in range(3)) * 1e3, 1
    )


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--models", type=int, default=500)
    parser.add_argument("--many", type=int, default=10_000)
    parser.add_argument("--tokens", type=int, default=32_000)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as place:
        root = Path(place)
        fill(root / "models", options.models, options.tokens)
        figures: dict[str, float] = measure_first(root / "models", root / "library.sqlite")
        fill(root / "many", options.many, None)
        figures |= measure_window(root / "many", root / "many.sqlite")
        with closing(LibraryIndex(root / "many.sqlite")) as index:
            census = index.census()
            entries = group(census.files, current_facts(census, index.facts()))
            figures["search_ms"] = measure_arranging([listed(entry, {}, {}) for entry in entries])
    print(f"{figures['files']} models: looked at in {figures['look_ms']} ms, with headers {figures['first_scan_s']} s,")
    print(f"known again in {figures['known_list_ms']} ms")
    print(f"{options.many} files: the window held still for {figures['longest_pause_ms']} ms at most,")
    print(f"showed them in {figures['show_ms']} ms and searched them in {figures['key_ms']} ms")
    print(json.dumps(figures))


if __name__ == "__main__":
    main()

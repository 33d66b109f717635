"""Asks a real NVIDIA card for the numbers that stand-ins recorded, and prints the differences.

    python -m tests.zoo.card [NAME ...] [--jobs N] [--out FILE]

The card is used as three devices. Small models are loaded in every recorded layout, well-known ones only probed; those
below `REAL_BYTES` are also loaded in a few layouts. `--out` writes every answer as a JSON line.
"""

from __future__ import annotations

import argparse
import gzip
import json
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from tests.support.headers import write_with_hole
from tests.zoo.follow import Move, moves, options_of
from tests.zoo.pack import FOLDER, pack_case, read_document
from tests.zoo.record import Engine, measure_cases

CARD = "cuda"
STAND_INS = ("sim", CARD)
SMALL_BYTES = 1 << 28
REAL_BYTES = 8 << 30
REAL_CASES = frozenset(("one-device-full", "three-devices-5-2-3", "partial-half-on-one-device", "flash-off"))

Pair = tuple[dict[str, Any], dict[str, Any]]


def cases_for(document: dict[str, Any]) -> dict[str, list[dict[str, Any]]]:
    """Return the recorded cases of a model that a card can be asked for, by kind of load."""
    size_bytes = document["size_bytes"]
    cases = [case for case in document["cases"] if case["stand_ins"] in STAND_INS]
    real = [case for case in cases if case["load"] == "real"]
    if size_bytes > SMALL_BYTES:
        real = [case for case in real if case["name"] in REAL_CASES and size_bytes < REAL_BYTES]
        return {"no_alloc": [case for case in cases if case["load"] == "no_alloc"], "real": real}
    return {"real": real}


def ask_card(name: str, engine: Engine, folder: Path) -> list[Pair]:
    """Return each case of a model as it was recorded and as the card answers; the file is made in `folder`."""
    document = read_document(name)
    header = gzip.decompress((FOLDER / "headers" / f"{name}.gguf.head.gz").read_bytes())
    path = write_with_hole(folder / f"{name}.gguf", header, document["size_bytes"])
    pairs: list[Pair] = []
    try:
        for load, cases in cases_for(document).items():
            found = measure_cases(path, [options_of(case) for case in cases], engine, real=load == "real")
            pairs += [(case, pack_case(result, CARD, load)) for case, result in zip(cases, found, strict=True)]
    finally:
        path.unlink()
    return pairs


def differences(pairs: Sequence[Pair]) -> list[Move]:
    """Return what the card says otherwise. Members of a tensor split are told by the stand-ins alone."""
    return [move for before, after in pairs if before.get("split_mode") != "tensor" for move in moves(before, after)]


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line entry point: 0 where nothing differs, 1 where something does."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("names", nargs="*", help="models of the zoo; all where none is named")
    parser.add_argument("--jobs", type=int, default=1, help="models asked at once")
    parser.add_argument("--out", type=Path, help="keeps every answer")
    options = parser.parse_args(arguments)
    names = options.names or sorted(path.name.removesuffix(".json.gz") for path in (FOLDER / "truth").iterdir())
    engine = Engine(Path(sys.executable), card=CARD)
    total = 0
    with TemporaryDirectory() as folder, ThreadPoolExecutor(options.jobs) as pool:
        asked = {pool.submit(ask_card, name, engine, Path(folder)): name for name in names}
        for future in as_completed(asked):
            pairs, name = future.result(), asked[future]
            found = differences(pairs)
            total += len(found)
            print(f"{name}: {len(pairs)} cases, {len(found)} numbers differ", flush=True)
            for move in found:
                print(f"  {move}")
            if options.out is not None:
                with options.out.open("a", encoding="utf-8") as out:
                    out.writelines(json.dumps({"model": name, **after}) + "\n" for _, after in pairs)
    return 1 if total else 0


if __name__ == "__main__":
    sys.exit(main())

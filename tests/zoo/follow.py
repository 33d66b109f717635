"""Records the zoo again with another engine and prints the changes: `python3 make.py follow VERSION [NAME ...]`.

Each recorded case is repeated with the new engine, on the same stand-ins and with the same kind of load, and its
numbers are compared with the recorded ones. With `--keep` the new numbers replace them.
"""

from __future__ import annotations

import argparse
import gzip
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from msgspec import Struct

from engine.base.values import replace
from tests.support.headers import write_with_hole
from tests.zoo.pack import FOLDER, pack_case, read_document, write_document
from tests.zoo.record import Engine, measure_cases

_NOT_OPTIONS = frozenset(("stand_ins", "load", "pipeline", "host", "devices", "output", "error", "reason"))
_PARTS = ("weights", "state", "compute", "repacked")
_SHOWN_LINES = 40
"""Lines a model: a new engine moves the same buffer in many cases."""


class Move(Struct, frozen=True):
    """What a case said before and says now: a number in bytes, or a text where the engine refused."""

    case: str
    what: str
    before: int | str | None
    after: int | str | None

    def __str__(self) -> str:
        if isinstance(self.before, int) and isinstance(self.after, int):
            return f"{self.case:52} {self.what:18} {self.before:>15,} {self.after:>15,} {self.after - self.before:+,}"
        return f"{self.case:52} {self.what:18} {self.before} -> {self.after}"


def case_name(case: Mapping[str, Any]) -> str:
    """Return what tells a case of a model from its others."""
    return f"{case['stand_ins']} {case['load']} {case['name']}"


def moves(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[Move]:
    """Return the differences between two records of one case."""
    name = case_name(before)
    if "error" in before or "error" in after:
        texts = [" ".join([case["error"], *case["reason"]]) if "error" in case else None for case in (before, after)]
        # The same refusal may be worded anew; that one side refuses and the other does not is what counts.
        return [] if None not in texts else [Move(name, "refused", texts[0], texts[1])]
    found = [
        Move(name, f"{where} {part}", old, new)
        for where in sorted({"host", *before["devices"], *after["devices"]})
        for part, old, new in zip(_PARTS, _numbers(before, where), _numbers(after, where), strict=True)
        if old != new
    ]
    if before["pipeline"] != after["pipeline"]:
        found.append(Move(name, "pipeline", str(before["pipeline"]), str(after["pipeline"])))
    return found


def _numbers(case: Mapping[str, Any], where: str) -> list[int]:
    numbers: Sequence[int] = case["host"] if where == "host" else case["devices"].get(where, ())
    return [*numbers, *[0] * (len(_PARTS) - len(numbers))]


def options_of(case: Mapping[str, Any]) -> dict[str, Any]:
    """Return what was asked of the engine: the name and the options that are not the defaults."""
    return {key: value for key, value in case.items() if key not in _NOT_OPTIONS}


def record_again(name: str, engine: Engine, folder: Path) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    """Yield each kept case of a model with its new record; the file with the model's header is made in `folder`."""
    document = read_document(name)
    header = gzip.decompress((FOLDER / "headers" / f"{name}.gguf.head.gz").read_bytes())
    path = write_with_hole(folder / f"{name}.gguf", header, document["size_bytes"])
    groups: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for case in document["cases"]:
        groups.setdefault((case["stand_ins"], case["load"]), []).append(case)
    try:
        for (stand_ins, load), cases in groups.items():
            asked = _engine_for(stand_ins, engine)
            if asked is None:
                continue
            found = measure_cases(path, [options_of(case) for case in cases], asked, real=load == "real")
            for case, result in zip(cases, found, strict=True):
                yield case, pack_case(result, stand_ins, load)
    finally:
        path.unlink()


def _engine_for(stand_ins: str, engine: Engine) -> Engine | None:
    """Return `engine` with stand-ins of this kind, None where it has none."""
    if stand_ins == "rpc":
        return Engine(engine.python)
    if stand_ins == "sim":
        return None if engine.simdev is None else replace(engine, card=None)
    return Engine(engine.python, card=stand_ins) if engine.card == stand_ins else None


def build_stand_ins(source: Path, folder: Path) -> tuple[Path, Path]:
    """Compile `simdev.c` and `nopopulate.c` against an engine's source; return both libraries.

    Raises:
        CalledProcessError: where the engine's inner headers have changed; `simdev.c` follows them.
    """
    ggml = next(source.rglob("ggml-backend-impl.h")).parents[1]
    simdev, preload = folder / "libsimdev.so", folder / "libnopopulate.so"
    compiler = os.environ.get("CC", "cc")
    include = [f"-I{ggml / 'include'}", f"-I{ggml / 'src'}"]
    common = [compiler, "-O1", "-shared", "-fPIC"]
    subprocess.run([*common, "-std=gnu11", *include, str(FOLDER / "simdev.c"), "-o", str(simdev)], check=True)
    subprocess.run([*common, str(FOLDER / "nopopulate.c"), "-o", str(preload)], check=True)
    return simdev, preload


def follow(names: Sequence[str], engine: Engine, *, keep: bool) -> int:
    """Print what moved of each model; return how many numbers did."""
    n_cases, counts = 0, Counter[str]()
    with TemporaryDirectory() as folder:
        for name in names:
            pairs = list(record_again(name, engine, Path(folder)))
            found = [move for before, after in pairs for move in moves(before, after)]
            n_cases += len(pairs)
            print(f"{name}: {len(pairs)} cases, {len(found)} moved", flush=True)
            for move in found[:_SHOWN_LINES]:
                print(f"  {move}")
            if len(found) > _SHOWN_LINES:
                print(f"  and {len(found) - _SHOWN_LINES} more")
            counts.update(move.what.split()[-1] for move in found)
            if keep and pairs:
                _keep(name, [after for _, after in pairs])
    moved = ", ".join(f"{count} {what}" for what, count in counts.most_common()) or "nothing moved"
    print(f"{len(names)} models, {n_cases} cases: {moved}")
    return counts.total()


def _keep(name: str, cases: Sequence[dict[str, Any]]) -> None:
    document = read_document(name)
    new = {case_name(case): case for case in cases}
    document["cases"] = [new.get(case_name(case), case) for case in document["cases"]]
    write_document(name, document)


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line entry point: 0 where nothing moved, 1 where something did."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("names", nargs="*", help="models of the zoo; all where none is named")
    parser.add_argument("--python", type=Path, default=Path(sys.executable), help="the interpreter with the engine")
    parser.add_argument("--source", type=Path, help="the engine's source; without it only RPC stand-ins are asked")
    parser.add_argument("--keep", action="store_true", help="keep the new numbers in place of the old ones")
    options = parser.parse_args(arguments)
    known = sorted(path.name.removesuffix(".json.gz") for path in (FOLDER / "truth").iterdir())
    if unknown := sorted(set(options.names) - set(known)):
        parser.error(f"the zoo has no {', '.join(unknown)}")
    with TemporaryDirectory() as folder:
        simdev, preload = build_stand_ins(options.source, Path(folder)) if options.source else (None, None)
        engine = Engine(options.python, simdev, preload)
        return 1 if follow(options.names or known, engine, keep=options.keep) else 0


if __name__ == "__main__":
    sys.exit(main())

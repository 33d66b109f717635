"""Packs recordings of `record.py`, and the headers of their models, into `headers/` and `truth/`.

    python -m tests.zoo.pack MODELS... --truth FOLDER... [--answers FILE...]

MODELS are GGUF files, or headers of them (`NAME.gguf.head` beside a `sizes.json`); a FOLDER holds `NAME.json`. Existing
cases with the same name, stand-ins and kind of load are replaced, others stay. A FILE is the output of `tests.zoo.card
--out`: of its answers those are taken that differ from the stand-ins'.
"""

from __future__ import annotations

import argparse
import gzip
import json
from pathlib import Path
from typing import Any

from engine.model.gguf.reader import read_model

FOLDER = Path(__file__).parent
STAND_INS = "sim"
_RESULTS = ("devices", "host", "by_buffer_type", "log", "seconds", "error", "reason")
_PARTS = ("model", "context", "compute")


def short_name(stem: str) -> str:
    """Return the name of a model without its quantisation mix and the word that it has no vocabulary."""
    head, _, tail = stem.removesuffix(".novocab").rpartition(".")
    return head if head and tail.isupper() else stem.removesuffix(".novocab")


def pack_model(path: Path) -> None:
    """Keep the header of one model and its full length."""
    if path.suffix == ".head":
        stem = path.name.removesuffix(".gguf.head")
        header = path.read_bytes()
        size_bytes = json.loads((path.parent / "sizes.json").read_text(encoding="utf-8"))[f"{stem}.gguf"]
    else:
        stem = path.stem
        with path.open("rb") as file:
            header = file.read(min(tensor.offset for tensor in read_model(path).tensors))
        size_bytes = path.stat().st_size
    name = short_name(stem)
    (FOLDER / "headers" / f"{name}.gguf.head.gz").write_bytes(gzip.compress(header, mtime=0))
    document = read_document(name)
    document["size_bytes"] = size_bytes
    write_document(name, document)


def pack_truth(path: Path) -> None:
    """Keep what is compared of one recorded file."""
    record = json.loads(path.read_text(encoding="utf-8"))
    name = short_name(path.stem)
    document = read_document(name)
    cases = {(case["stand_ins"], case["load"], case["name"]): case for case in document["cases"]}
    for load in ("no_alloc", "real"):
        for case in record.get(load, ()):
            packed = pack_case(case, record["stand_ins"], load)
            cases[packed["stand_ins"], packed["load"], packed["name"]] = packed
    document["cases"] = list(cases.values())
    write_document(name, document)


def pack_answers(path: Path) -> None:
    """Put CUDA's answers in the place of the stand-ins' where the two differ, and add those that have no such place."""
    answers: dict[str, list[dict[str, Any]]] = {}
    for line in path.read_text(encoding="utf-8").splitlines():
        answer = json.loads(line)
        answers.setdefault(answer.pop("model"), []).append(answer)
    for name, found in answers.items():
        document = read_document(name)
        places = {(case["stand_ins"], case["load"], case["name"]): n for n, case in enumerate(document["cases"])}
        for answer in found:
            own = places.get((answer["stand_ins"], answer["load"], answer["name"]))
            place = places.get((STAND_INS, answer["load"], answer["name"])) if own is None else own
            if place is None:
                document["cases"].append(answer)
            elif own is not None or _sizes(answer) != _sizes(document["cases"][place]):
                document["cases"][place] = answer
        write_document(name, document)


def _sizes(case: dict[str, Any]) -> object:
    return case.get("devices"), case.get("host")


def read_document(name: str) -> dict[str, Any]:
    """Return what is kept of one model, an empty document where there is nothing yet."""
    path = FOLDER / "truth" / f"{name}.json.gz"
    if not path.exists():
        return {"size_bytes": 0, "cases": []}
    document: dict[str, Any] = json.loads(gzip.decompress(path.read_bytes()))
    return document


def write_document(name: str, document: dict[str, Any]) -> None:
    """Keep the document of one model, a line a case."""
    lines = ",\n".join(json.dumps(case, separators=(",", ":")) for case in document["cases"])
    text = f'{{"size_bytes":{document["size_bytes"]},"cases":[\n{lines}\n]}}\n'
    (FOLDER / "truth" / f"{name}.json.gz").write_bytes(gzip.compress(text.encode(), mtime=0))


def pack_case(case: dict[str, Any], stand_ins: str, load: str) -> dict[str, Any]:
    """Return what is kept of one measured case."""
    options = {key: value for key, value in case.items() if key not in _RESULTS}
    packed = {"name": options.pop("name"), "stand_ins": stand_ins, "load": load, **options}
    if "error" in case:
        return {**packed, "error": case["error"], "reason": case["reason"]}
    repacked = case["by_buffer_type"].get("CPU_REPACK", {"model": 0})["model"]
    return {
        **packed,
        "pipeline": case["log"]["pipeline_parallel"],
        "host": [*(case["host"][part] for part in _PARTS), repacked],
        "devices": {number: [sizes[part] for part in _PARTS] for number, sizes in case["devices"].items()},
        "output": [line for line in case["log"]["buffer_lines"] if "output buffer size" in line],
    }


def main() -> None:
    """Command line entry point."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("models", nargs="*", type=Path)
    parser.add_argument("--truth", nargs="*", default=[], type=Path)
    parser.add_argument("--answers", nargs="*", default=[], type=Path)
    options = parser.parse_args()
    for path in options.models:
        pack_model(path)
    for folder in options.truth:
        for path in sorted(folder.glob("*.json")):
            pack_truth(path)
    for path in options.answers:
        pack_answers(path)


if __name__ == "__main__":
    main()

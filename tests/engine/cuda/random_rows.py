"""Forecasts compared to the byte with the engine's report, in random loads on simulated CUDA cards.

    python -m tests.engine.cuda.random_rows OUT.jsonl [--number 2000] [--known] [--summary]

Models are the zoo's, with a hole in place of weights. `--known` takes the well-known ones of any size, without CPU
layers (with `LD_PRELOAD` of `tests/zoo/nopopulate.c`; see `random_answers.py`). The engine with CUDA must be importable
(`PYTHONPATH`), as for the tests here.
"""

from __future__ import annotations

import random
import sys
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from engine.devices.device import CPU_ID, Rig
from engine.devices.rig_file import parse_rig
from engine.model.gguf.model_file import ModelFile
from engine.planning.plan.plan import Plan
from engine.planning.plan.report import DeviceRow
from engine.runtime.session.events import Loaded
from engine.runtime.session.load_spec import LoadSpec
from tests.engine.cuda.random_loads import random_layout
from tests.engine.cuda.random_runs import (
    append_records,
    command_line,
    limit_expert_ids,
    new_parser,
    plan_of,
    read_records,
    run_with_cards,
    write_models,
)
from tests.support.session_log import SessionLog

MODULE = "tests.engine.cuda.random_rows"
LARGE_CARDS = ", ".join(["H200=9.0=1048576"] * 4)
WITHOUT_WARM_UP = [
    sys.executable,
    "-c",
    "from engine.runtime.child.load.warm_up import WarmUp; WarmUp._compute = lambda *_: None; "
    "from engine.runtime.child.__main__ import main; main()",
]
"""Command of a child that computes nothing after a load. Its rows are those that the engine planned. Batches of a
warm-up may need a little more than the engine planned for, and how many there are depends on the time they take."""
PARTS = ("weights", "mapped", "state", "compute", "output")


def random_case(rng: random.Random, model: ModelFile, cards: Sequence[str], *, known: bool) -> dict[str, Any]:
    """Return a random layout file, with larger batches and contexts and more overrides than loads with answers have."""
    document = random_layout(rng, model.n_layers, cards)
    context = document["context"]
    if rng.random() < 0.4:
        context["n_ctx"] = rng.choice([700, 3000, 5000, 16384, 32768])
        context["n_seq_max"] = rng.choice([1, 1, 2, 3, 4])
    if rng.random() < 0.2:
        context["n_ubatch"] = rng.choice([1, 17, 96, 2048, 4096])
        context["n_batch"] = max(context["n_ubatch"], context["n_batch"])
    if rng.random() < 0.1:
        context["type_k"] = context["type_v"] = rng.choice(["q4_1", "q5_0", "iq4_nl"])
    if document.get("overrides") and rng.random() < 0.4:
        first = rng.randrange(model.n_layers)
        layers = f"{first}-{rng.randint(first, model.n_layers - 1)}"
        part = rng.choice(["experts", "ffn", "attention"])
        document["overrides"].append({"part": part, "layers": layers, "device": rng.choice([*cards, "CPU"])})
    return without_cpu(document, cards[0]) if known else document


def without_cpu(document: dict[str, Any], card: str) -> dict[str, Any]:
    """Return the layout with a card in place of the CPU, which would compute with weights of any size."""
    context = {**document["context"], "offload_kqv": True, "load_mode": "mmap"}
    rows = [{**row, "device": card if row["device"] == CPU_ID else row["device"]} for row in document["runs"]]
    runs: list[dict[str, Any]] = []
    for row in rows:
        if runs and runs[-1]["device"] == row["device"]:
            first, last = runs[-1]["layers"].split("-")[0], row["layers"].split("-")[1]
            runs[-1] = {**row, "layers": f"{first}-{last}"}
        else:
            runs.append(row)
    found = {**document, "context": context, "runs": runs}
    found.pop("output", None)
    if "overrides" in found:
        found["overrides"] = [row for row in found["overrides"] if row["device"] != CPU_ID]
    return found


def parts_of(row: DeviceRow) -> dict[str, int]:
    """Return what is compared of a row, in bytes."""
    state_bytes = row.kv_cache_bytes + row.recurrent_bytes
    sizes = (row.weights_bytes, row.mapped_bytes, state_bytes, row.compute_bytes, row.output_bytes)
    return dict(zip(PARTS, sizes, strict=True))


def differences(forecast: Iterable[DeviceRow], measured: Iterable[DeviceRow]) -> list[list[Any]]:
    """Return device, part, forecast bytes and the engine's bytes of what differs."""
    found: list[list[Any]] = []
    engine = {row.id: parts_of(row) for row in measured}
    for row in forecast:
        ours = parts_of(row)
        found += [
            [row.id, part, ours[part], engine[row.id][part]] for part in PARTS if ours[part] != engine[row.id][part]
        ]
    return found


def one_load(seed: int, models: Mapping[str, ModelFile], rig: Rig, *, known: bool, warm_up: bool) -> dict[str, Any]:
    """Make and load a random plan, and return what differs."""
    rng = random.Random(f"rows {seed}")
    name = rng.choice(sorted(models))
    model = models[name]
    document = random_case(rng, model, [device.id for device in rig.devices], known=known)
    record: dict[str, Any] = {"seed": seed, "model": name, "architecture": model.architecture, "layout": document}
    plan = plan_of(document, model, rig)
    if not isinstance(plan, Plan):
        return {**record, **plan}
    limit_expert_ids(model)
    with SessionLog(None if warm_up else WITHOUT_WARM_UP) as log:
        log.session.load(LoadSpec(plan))
        (loaded,) = log.wait_for_endings(1)
    if not isinstance(loaded, Loaded):
        return {**record, "outcome": type(loaded).__name__, "what": getattr(loaded, "message", "")}
    off = differences(loaded.forecast, loaded.devices)
    rows = sum(any(parts_of(row).values()) for row in loaded.devices)
    return {**record, "outcome": "off" if off else "exact", "rows": rows, "off": off}


def summary(records: Sequence[Mapping[str, Any]]) -> str:
    """Return how many loads and rows agree, and what differs by architecture, device and part."""
    loaded = [record for record in records if record["outcome"] in ("exact", "off")]
    exact = [record for record in loaded if not record["off"]]
    off_rows = sum(len({row[0] for row in record["off"]}) for record in loaded)
    lines = [
        f"{len(records)} seeds, {len(loaded)} loads, {len(exact)} exact; {sum(r['rows'] for r in loaded)} rows, "
        f"{off_rows} off; {len({r['architecture'] for r in loaded})} architectures, "
        f"{len({r['model'] for r in loaded})} models",
        str(dict(Counter(record["outcome"] for record in records))),
        "by kind: " + str(dict(Counter(kind for record in loaded for kind in kinds(record["layout"])))),
    ]
    causes: dict[tuple[str, str, str], list[Any]] = defaultdict(list)
    for record in loaded:
        for device, part, ours, engine in record["off"]:
            where = "CPU" if device == CPU_ID else "card"
            causes[record["model"], where, part].append((ours - engine, record["seed"]))
    for (model, where, part), found in sorted(causes.items(), key=lambda each: -len(each[1])):
        sizes = [difference for difference, _seed in found]
        seeds = sorted({seed for _difference, seed in found})[:6]
        lines.append(f"{model:24} {where:4} {part:8} {len(found):4} rows {min(sizes):+,} to {max(sizes):+,}; {seeds}")
    return "\n".join(lines)


def kinds(document: Mapping[str, Any]) -> list[str]:
    """Return what a layout is a case of."""
    context = document["context"]
    found = [f"split {document['split_mode']}", f"K {context['type_k']}", f"flash {context['flash_attn']}"]
    found += ["overrides"] if document.get("overrides") else []
    found += ["pipeline"] if context["pipeline"] == "on" else []
    found += ["CPU layers"] if any(row["device"] == CPU_ID for row in document["runs"]) else []
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    """Make the loads, write a record of each, and print a summary; 1 if anything differs."""
    parser = new_parser(MODULE, 2000)
    parser.add_argument("--known", action="store_true", help="the well-known models, of any size")
    parser.add_argument("--warm-up", action="store_true", help="compare what is held after the first batches")
    options = parser.parse_args(arguments)
    if options.summary:
        print(summary(read_records(options.out)))
        return 0
    cards = {"STAND_IN_CARDS": LARGE_CARDS} if options.known else {}
    if (code := run_with_cards(MODULE, arguments, **cards)) is not None:
        return code
    with TemporaryDirectory() as name:
        rig = parse_rig(command_line("devices"))
        models = write_models(Path(name), small=not options.known, only=options.only)
        records = append_records(
            options, lambda seed: one_load(seed, models, rig, known=options.known, warm_up=options.warm_up)
        )
    print(summary(records))
    return 1 if any(record["outcome"] == "off" for record in records) else 0


if __name__ == "__main__":
    raise SystemExit(main())

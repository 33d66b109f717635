"""Random loads with short answers on simulated CUDA cards: `python -m tests.engine.cuda.random_loads OUT.jsonl`.

It looks for layouts and settings that our rules accept and the engine aborts on. The engine with CUDA must be
importable (`PYTHONPATH`), as for the tests here. A load depends only on its seed: `--first N --number 1` repeats one.
"""

from __future__ import annotations

import argparse
import gzip
import json
import os
import random
import subprocess
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from engine.base.errors import EngineError
from engine.devices.device import Rig
from engine.devices.rig_file import parse_rig
from engine.model.gguf.model_file import ModelFile
from engine.model.gguf.reader import read_model
from engine.planning.layout.layout_file import parse_layout
from engine.planning.memory.model_memory import ModelMemory
from engine.planning.plan.edit import Edit
from engine.planning.plan.plan import Plan
from engine.runtime.protocol.requests import Embed, Generate
from engine.runtime.session.events import Loaded, RequestEnding
from engine.runtime.session.load_spec import LoadSpec
from tests.engine.cuda.cards import build
from tests.support.headers import write_with_hole
from tests.support.session_log import SessionLog
from tests.zoo.pack import read_document

CARDS = "RTX 3090=8.6=24576, RTX 3090=8.6=24576, RTX 5070=12.0=12288, RTX 5080=12.0=16384"
HEADERS = Path(__file__).parents[2] / "zoo" / "headers"
MOST_BYTES = 256 << 20
KV_KINDS = ("f16", "f16", "f16", "q8_0", "q4_0", "bf16", "f32", "q5_1")


def small_models(folder: Path) -> list[Path]:
    """Write the small models of the zoo into `folder`, with a hole in place of weights."""
    found = []
    for head in sorted(HEADERS.glob("*.gguf.head.gz")):
        name = head.name.removesuffix(".gguf.head.gz")
        size_bytes = read_document(name)["size_bytes"]
        if size_bytes <= MOST_BYTES:
            found.append(write_with_hole(folder / f"{name}.gguf", gzip.decompress(head.read_bytes()), size_bytes))
    return found


def random_context(rng: random.Random) -> dict[str, Any]:
    """Return random context settings of a layout file."""
    ubatch = rng.choice([32, 64, 128, 256, 512, 512, 1024])
    one = rng.choice(KV_KINDS)
    context = {
        "n_ctx": rng.choice([256, 512, 1024, 2048, 4096, 8192]),
        "n_ubatch": ubatch,
        "n_batch": max(ubatch, rng.choice([512, 2048])),
        "n_seq_max": rng.choice([1, 1, 1, 2, 4]),
        "type_k": one,
        "type_v": one if rng.random() < 0.7 else rng.choice(KV_KINDS),
        "flash_attn": rng.choice(["auto", "on", "off"]),
        "pipeline": rng.choice(["auto", "on", "off"]),
        "kv_unified": rng.random() < 0.4,
        "swa_full": rng.random() < 0.3,
        "offload_kqv": rng.random() < 0.8,
        "op_offload": rng.choice([True, True, False]),
        "load_mode": rng.choice(["auto", "auto", "mmap", "none"]),
    }
    if context["flash_attn"] == "off" and rng.random() < 0.8:
        context["type_v"] = rng.choice(["f16", "bf16", "f32"])
    return context


def random_layout(rng: random.Random, n_layers: int, cards: Sequence[str]) -> dict[str, Any]:
    """Return a random layout file for a model of `n_layers` layers."""
    last = n_layers - 1
    cards = rng.sample(cards, rng.randint(1, len(cards)))
    mode = rng.choices(["layer", "none", "tensor"], [8, 1, 2 if len(cards) > 1 else 0])[0]
    document: dict[str, Any] = {"version": 1, "split_mode": mode, "context": random_context(rng)}
    if mode == "none":
        document["runs"] = [{"device": cards[0], "layers": f"0-{last}"}]
    elif mode == "tensor":
        lead = rng.choice([0, 0, 1]) if n_layers > 2 else 0
        leading = [{"device": "CPU", "layers": f"0-{lead - 1}"}] if lead else []
        document["runs"] = [*leading, {"device": cards[0], "layers": f"{lead}-{last}"}]
        document["tensor_split"] = {card: rng.choice([1, 1, 2, 3]) for card in cards}
    else:
        places = list(cards)
        for _ in range(rng.choice([0, 1, 1, 2])):
            places.insert(rng.randint(0, len(places)), "CPU")
        places = [each for at, each in enumerate(places) if at == 0 or each != places[at - 1]][:n_layers]
        cuts = sorted(rng.sample(range(1, n_layers), len(places) - 1))
        edges = zip(places, [0, *cuts], [*cuts, n_layers], strict=True)
        document["runs"] = [{"device": place, "layers": f"{begin}-{end - 1}"} for place, begin, end in edges]
        if rng.random() < 0.25:
            document["output"] = rng.choice([*cards, "CPU"])
    if mode != "tensor" and rng.random() < 0.3:
        first = rng.randrange(n_layers)
        document["overrides"] = [
            {
                "part": rng.choice(["experts", "ffn", "attention", "all"]),
                "layers": f"{first}-{rng.randint(first, last)}",
                "device": rng.choice([*cards, "CPU", "CPU"]),
            }
        ]
    return document


def plan_of(document: Mapping[str, Any], model: ModelFile, rig: Rig) -> Plan | dict[str, Any]:
    """Return the plan of a layout document; if it is refused, the fields `outcome` and `what` of its record."""
    try:
        file = parse_layout(json.dumps(document), n_layers=model.n_layers)
        plan = Plan(ModelMemory(model), rig, Edit(file.layout, file.context))
        if plan.violations:
            return {"outcome": "rule", "what": [each.rule for each in plan.violations]}
        if plan.report.probe_only:
            return {"outcome": "unknown", "what": plan.report.probe_only}
    except EngineError as error:
        return {"outcome": "refused", "what": error.summary()}
    return plan


def limit_expert_ids(model: ModelFile) -> None:
    """Tell the stand-in cards how many experts there are: they make up ids, which the engine reads back and checks."""
    experts = model.hyper_parameter("expert_count")
    os.environ["STAND_IN_EXPERTS"] = str(experts if isinstance(experts, int) and experts else 1)


def one_load(seed: int, models: Mapping[str, ModelFile], rig: Rig) -> dict[str, Any]:
    """Make, load and ask a random plan, and return what became of it."""
    rng = random.Random(seed)
    name = rng.choice(sorted(models))
    model = models[name]
    document = random_layout(rng, model.n_layers, [device.id for device in rig.devices])
    prompt = "a " * rng.choice([3, 40, 400])
    record: dict[str, Any] = {"seed": seed, "model": name, "layout": document, "prompt": len(prompt)}
    try:
        file = parse_layout(json.dumps(document), n_layers=model.n_layers)
        plan = Plan(ModelMemory(model), rig, Edit(file.layout, file.context))
        if plan.violations:
            return {**record, "outcome": "rule", "what": [each.rule for each in plan.violations]}
    except EngineError as error:
        return {**record, "outcome": "refused", "what": error.summary()}
    limit_expert_ids(model)
    with SessionLog() as log:
        log.session.load(LoadSpec(plan))
        (loaded,) = log.wait_for_endings(1)
        if not isinstance(loaded, Loaded):
            return {**record, "outcome": type(loaded).__name__, "where": "load", "what": getattr(loaded, "message", "")}
        answers = plan.settings.n_seq_max if rng.random() < 0.5 else 1
        makes_text = model.hyper_parameter("attention.causal") is not False
        for _ in range(answers):
            log.session.ask(Generate(prompt=prompt, max_tokens=3, seed=1) if makes_text else Embed(texts=(prompt,)))
        log.wait_until(lambda: sum(isinstance(each, RequestEnding) for each in log.endings[1:]) >= answers)
        ending = next((each for each in log.endings[1:] if type(each).__name__ in ("Crashed", "Failed")), None)
        ending = ending or log.endings[-1]
    return {**record, "outcome": type(ending).__name__, "where": "answer", "what": getattr(ending, "message", "")}


def main(arguments: Sequence[str] | None = None) -> int:
    """Make the loads, write a record of each, and print how many ended how."""
    parser = argparse.ArgumentParser(prog="python -m tests.engine.cuda.random_loads")
    parser.add_argument("out", type=Path, help="records are appended as lines of JSON")
    parser.add_argument("--number", type=int, default=2000)
    parser.add_argument("--first", type=int, default=1, help="seed of the first load")
    parser.add_argument("--only", default="", help="part of the names of models")
    options = parser.parse_args(arguments)
    # The loader reads its path at the start of a process only, and NVML is asked in this one.
    if "STAND_IN_CARDS" not in os.environ:
        with TemporaryDirectory() as name:
            again = [sys.executable, "-m", "tests.engine.cuda.random_loads", *(arguments or sys.argv[1:])]
            return subprocess.run(again, env=with_cards(Path(name)), check=False).returncode
    counts: Counter[str] = Counter()
    with TemporaryDirectory() as name, options.out.open("a", encoding="utf-8") as out:
        folder = Path(name)
        rig = parse_rig(command_line("devices"))
        models = {path.stem: read_model(path) for path in small_models(folder) if options.only in path.stem}
        for seed in range(options.first, options.first + options.number):
            record = one_load(seed, models, rig)
            counts[record["outcome"]] += 1
            out.write(json.dumps(record) + "\n")
            out.flush()
    print(dict(counts), "over", len(models), "models")
    return 0


def with_cards(folder: Path) -> dict[str, str]:
    """Build the cards in `folder`, and return the environment of a process that sees them."""
    build(folder)
    return {
        **os.environ,
        "STAND_IN_CARDS": CARDS,
        "STAND_IN_CONTEXT": "450",
        "STAND_IN_EMPTY": "1",
        "LD_LIBRARY_PATH": os.pathsep.join(filter(None, [str(folder), os.environ.get("LD_LIBRARY_PATH")])),
    }


def command_line(*words: str) -> str:
    """Return what the command line prints as JSON."""
    command = [sys.executable, "-c", "import sys; from app.cli import main; sys.exit(main())", *words, "--json"]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=120).stdout


if __name__ == "__main__":
    raise SystemExit(main())

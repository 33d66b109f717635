"""Random loads with short answers on simulated CUDA cards: `python -m tests.engine.cuda.random_loads OUT.jsonl`.

It looks for layouts and settings that our rules accept and the engine aborts on. The engine with CUDA must be
importable (`PYTHONPATH`), as for the tests here.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from engine.devices.device import Rig
from engine.devices.rig_file import parse_rig
from engine.model.gguf.model_file import ModelFile
from engine.planning.plan.plan import Plan
from engine.runtime.protocol.requests import Embed, Generate
from engine.runtime.session.events import Loaded, RequestEnding
from engine.runtime.session.load_spec import LoadSpec
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

MODULE = "tests.engine.cuda.random_loads"
KV_KINDS = ("f16", "f16", "f16", "q8_0", "q4_0", "bf16", "f32", "q5_1")


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


def one_load(seed: int, models: Mapping[str, ModelFile], rig: Rig) -> dict[str, Any]:
    """Make, load and ask a random plan, and return what became of it."""
    rng = random.Random(seed)
    name = rng.choice(sorted(models))
    model = models[name]
    document = random_layout(rng, model.n_layers, [device.id for device in rig.devices])
    prompt = "a " * rng.choice([3, 40, 400])
    record: dict[str, Any] = {"seed": seed, "model": name, "layout": document, "prompt": len(prompt)}
    plan = plan_of(document, model, rig, any_model=True)
    if not isinstance(plan, Plan):
        return {**record, **plan}
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


def summary(records: Sequence[Mapping[str, Any]]) -> str:
    """Return how many loads ended how."""
    models = {record["model"] for record in records}
    return f"{dict(Counter(record['outcome'] for record in records))} over {len(models)} models"


def main(arguments: Sequence[str] | None = None) -> int:
    """Make the loads, write a record of each, and print how many ended how."""
    options = new_parser(MODULE, 2000).parse_args(arguments)
    if options.summary:
        print(summary(read_records(options.out)))
        return 0
    if (code := run_with_cards(MODULE, arguments)) is not None:
        return code
    with TemporaryDirectory() as name:
        rig = parse_rig(command_line("devices"))
        models = write_models(Path(name), small=True, only=options.only)
        records = append_records(options, lambda seed: one_load(seed, models, rig))
    print(summary(records))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

"""Memory peaks of simulated CUDA cards during answers, compared with the forecast, in random loads.

    LD_PRELOAD=./libnopopulate.so python -m tests.engine.cuda.random_answers OUT.jsonl [--number 300] [--summary]

Models are well-known ones. Each load gets a prompt that fills the context, or a short one, with random flash attention,
micro batches up to 4,096, weights of types with and without kernels, experts, and tensor splits over 2 to 4 cards. The
library is `tests/zoo/nopopulate.c`, compiled with `gcc -shared -fPIC -o libnopopulate.so nopopulate.c -ldl`; without it
the loader reads a hole of many GiB. `--again` only computes the forecasts of OUT.jsonl again. The engine with CUDA must
be importable (`PYTHONPATH`), as for the tests here.
"""

from __future__ import annotations

import json
import os
import random
import struct
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from msgspec.structs import asdict

from engine.base.units import MIB
from engine.devices.device import Rig
from engine.devices.rig_file import parse_rig
from engine.model.gguf.model_file import TOKENIZER, ModelFile
from engine.model.gguf.reader import read_model
from engine.model.gguf.tensor_table import TENSOR_TYPES
from engine.planning.layout.layout_file import parse_layout
from engine.planning.memory.model_memory import ModelMemory
from engine.planning.plan.edit import Edit
from engine.planning.plan.plan import Plan
from engine.runtime.protocol.requests import Generate
from engine.runtime.session.events import Loaded, RequestEnding
from engine.runtime.session.load_spec import LoadSpec
from tests.engine.cuda.cards import read_ledger
from tests.engine.cuda.random_rows import without_cpu
from tests.engine.cuda.random_runs import (
    append_records,
    command_line,
    limit_expert_ids,
    model_names,
    new_parser,
    plan_of,
    read_header,
    read_records,
    run_with_cards,
)
from tests.support.gguf_bytes import F32, STRING, GgufBytes, Tensor, number_array, text_array, text_value
from tests.support.headers import write_with_hole
from tests.support.session_log import SessionLog
from tests.zoo.record import SCALARS

MODULE = "tests.engine.cuda.random_answers"
CARDS = "RTX 5090=12.0=1048576, RTX 5080=12.0=1048576, H100=9.0=1048576, H200=9.0=1048576"
"""Cards that an engine built for 9.0 has its best kernels on. On older ones it would take others."""
CONTEXT_MIB = "400"
"""What the forecast takes a context for."""
KINDS = {"as it is": None, "F16": 1, "BF16": 30, "Q4_0": 2, "IQ1_M": 29}
"""Types of the large weights, by ggml's numbers."""
SLOW = ("deepseek-v2-lite-old",)
"""Models whose attention the CPU computes."""


def parts_of_header(header: bytes) -> GgufBytes:
    """Return a header in parts that can be changed; values stay as they are written."""
    at = 24
    n_tensors, n_pairs = struct.unpack_from("<QQ", header, 8)

    def take(code: str) -> Any:
        nonlocal at
        (value,) = struct.unpack_from("<" + code, header, at)
        at += struct.calcsize("<" + code)
        return value

    def text() -> bytes:
        nonlocal at
        length = take("Q")
        at += length
        return header[at - length : at]

    def skip(kind: int) -> None:
        nonlocal at
        if kind == STRING:
            text()
        elif kind != 9:
            take(SCALARS[kind])
        else:
            inner, count = take("I"), take("Q")
            if inner == STRING:
                for _ in range(count):
                    text()
            else:
                at += count * struct.calcsize("<" + SCALARS[inner])

    pairs: dict[str | bytes, bytes] = {}
    for _ in range(n_pairs):
        key, begin = text().decode(), at
        skip(take("I"))
        pairs[key] = header[begin:at]
    tensors = []
    for _ in range(n_tensors):
        name = text()
        shape = tuple(take("Q") for _ in range(take("I")))
        tensors.append(Tensor(name, shape, take("I"), take("Q")))
    return GgufBytes(pairs=pairs, tensors=tensors)


def with_vocabulary(file: GgufBytes, n_vocab: int) -> None:
    """Give the file a vocabulary of `n_vocab` tokens, of which one is " a"."""
    pairs = {key: value for key, value in file.pairs.items() if not str(key).startswith("tokenizer.")}
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{value:02X}>" for value in range(256)), "\u2581a"]
    types = [2, 3, 3] + [6] * 256
    types += [1] * (n_vocab - len(types))
    tokens += [f"t{at}" for at in range(len(tokens), n_vocab)]
    pairs[TOKENIZER] = text_value("llama")
    pairs["tokenizer.ggml.tokens"] = text_array(tokens)
    pairs["tokenizer.ggml.scores"] = number_array([0.0] * n_vocab, F32)
    pairs["tokenizer.ggml.token_type"] = number_array(types)
    file.pairs = pairs


def with_types(file: GgufBytes, kind: int | None) -> int:
    """Give large weights another type, and all tensors their places; return the bytes of all tensors."""
    at = 0
    for tensor in file.tensors:
        name = tensor.name.decode() if isinstance(tensor.name, bytes) else tensor.name
        is_large = len(tensor.shape) > 1 and min(tensor.shape[:2]) >= 256 and name.endswith(".weight")
        is_large = is_large and ("attn_" in name or "ffn_" in name) and "_inp" not in name
        if kind is not None and is_large and tensor.shape[0] % 256 == 0:
            tensor.kind = kind
        n_elements = 1
        for extent in tensor.shape:
            n_elements *= extent
        traits = TENSOR_TYPES[tensor.kind]
        tensor.offset = at
        at += -(-n_elements // traits.block_elements * traits.block_bytes // 32) * 32
    return at


def write_model(path: Path, name: str, kind: int | None) -> Path:
    """Write a model of the zoo with a vocabulary and other types, and a hole in place of weights."""
    file = parts_of_header(read_header(name))
    n_vocab = next(tensor.shape[1] for tensor in file.tensors if tensor.name == b"token_embd.weight")
    with_vocabulary(file, n_vocab)
    size_bytes = with_types(file, kind)
    content = file.header()
    content += bytes(-len(content) % 32)
    return write_with_hole(path, content, len(content) + size_bytes)


def text_models() -> list[str]:
    """Return the names of the well-known models of the zoo that generate text."""
    others = ("bert", "bge", "embed", "t5", "lazy", "hrm")
    return [name for name in model_names(small=False) if not any(word in name for word in others)]


def random_case(rng: random.Random, model: ModelFile, cards: Sequence[str]) -> tuple[dict[str, Any], str]:
    """Return a random layout file, and how long the prompt is: "none", "short", or "full"."""
    last = model.n_layers - 1
    cards = rng.sample(cards, rng.choice([1, 1, 2, 3, 4]))
    flash = rng.choice(["on", "off", "off"])
    split = len(cards) > 1 and rng.random() < 0.5
    ubatch = rng.choice([128, 512, 512, 1024, 2048, 4096])
    one = rng.choice(["f16", "f16", "q8_0", "q4_0", "bf16", "f32"])
    context: dict[str, Any] = {
        "n_ctx": rng.choice([2048, 4096, 8192, 8192, 16384, 32768]),
        "n_ubatch": ubatch,
        "n_batch": max(2048, ubatch),
        "n_seq_max": rng.choice([1, 1, 1, 2, 4]),
        "kv_unified": rng.random() < 0.3,
        "type_k": one,
        "type_v": rng.choice(["f16", "bf16", "f32"]) if flash == "off" else one,
        "flash_attn": "on" if split else flash,
        "pipeline": rng.choice(["on", "off"]),
        "swa_full": rng.random() < 0.2,
        "load_mode": "mmap",
    }
    trained = model.n_ctx_train or context["n_ctx"]
    in_context = 1 if context["kv_unified"] else context["n_seq_max"]
    context["n_ctx"] = min(context["n_ctx"], trained * in_context)
    document: dict[str, Any] = {"version": 1, "split_mode": "tensor" if split else "layer", "context": context}
    if split:
        context["type_v"] = one
        document["runs"] = [{"device": cards[0], "layers": f"0-{last}"}]
        document["tensor_split"] = {card: rng.choice([1, 1, 2]) for card in cards}
    else:
        cuts = sorted(rng.sample(range(1, model.n_layers), len(cards) - 1))
        edges = zip(cards, [0, *cuts], [*cuts, model.n_layers], strict=True)
        document["runs"] = [{"device": card, "layers": f"{begin}-{end - 1}"} for card, begin, end in edges]
    return without_cpu(document, cards[0]), rng.choice(["none", "short", *["full"] * 6])


def one_case(seed: int, folder: Path, rig: Rig, only: str) -> dict[str, Any]:
    """Make, load and ask a random plan; return what each card held at most, and the forecast."""
    rng = random.Random(f"answers {seed}")
    name = rng.choice([each for each in text_models() if only in each])
    kind = rng.choice(["as it is", "as it is", *KINDS])
    if name in SLOW:
        return {"seed": seed, "model": name, "outcome": "slow"}
    path = write_model(folder / f"{name}.gguf", name, KINDS[kind])
    model = read_model(path)
    document, length = random_case(rng, model, [device.id for device in rig.devices])
    record: dict[str, Any] = {"seed": seed, "model": name, "types": kind, "layout": document, "prompt": length}
    plan = plan_of(document, model, rig)
    if not isinstance(plan, Plan):
        return {**record, **plan}
    limit_expert_ids(model)
    ledger = folder / "ledger"
    ledger.unlink(missing_ok=True)
    os.environ["STAND_IN_LEDGER"] = str(ledger)
    with SessionLog() as log:
        log.session.load(LoadSpec(plan))
        (loaded,) = log.wait_for_endings(1)
        if not isinstance(loaded, Loaded):
            return {**record, "outcome": type(loaded).__name__, "what": getattr(loaded, "message", "")}
        n_sequences = plan.settings.n_seq_max if length == "full" else 1
        room = (plan.settings.n_ctx or 0) // plan.settings.n_seq_max - 8
        prompt = " a" * (room if length == "full" else min(room, 300))
        asked = 0 if length == "none" else n_sequences
        for _ in range(asked):
            log.session.ask(Generate(prompt=prompt, max_tokens=3, seed=1))
        try:
            log.wait_until(lambda: sum(isinstance(each, RequestEnding) for each in log.endings[1:]) >= asked)
        except AssertionError:
            return {**record, "outcome": "slow"}
        endings = [type(each).__name__ for each in log.endings[1:]]
        what = [getattr(each, "message", "") for each in log.endings[1:]]
    if any(ending != "Done" for ending in endings):
        return {**record, "outcome": "/".join(sorted(set(endings))), "what": what}
    accounts = read_ledger(ledger).of_loader()
    rows = {row.id: row for row in loaded.forecast}
    held = {row.id: row for row in loaded.devices}
    cards = {}
    for number, account in accounts.items():
        row = rows[f"CUDA{number}"]
        cards[row.id] = {
            "forecast_bytes": row.need_bytes,
            "peak_bytes": account.peak_bytes,
            "answering_bytes": row.answering_bytes,
            "late_bytes": row.late_bytes,
            "rows_bytes": held[row.id].need_bytes,
            "forecast_rows_bytes": row.need_bytes - row.overhead_bytes - row.answering_bytes,
            "account": asdict(account),
        }
    return {**record, "outcome": "answered", "cards": cards}


def forecast_again(record: dict[str, Any], folder: Path, rig: Rig) -> dict[str, Any]:
    """Return the record with today's forecast."""
    if record["outcome"] != "answered":
        return record
    model = read_model(write_model(folder / "model.gguf", record["model"], KINDS[record["types"]]))
    file = parse_layout(json.dumps(record["layout"]), n_layers=model.n_layers)
    rows = {row.id: row for row in Plan(ModelMemory(model), rig, Edit(file.layout, file.context)).forecast}
    keys = ("answering_bytes", "late_bytes")
    cards = {
        name: {**card, "forecast_bytes": rows[name].need_bytes, **{key: getattr(rows[name], key) for key in keys}}
        for name, card in record["cards"].items()
    }
    return {**record, "cards": cards}


def summary(records: Sequence[Mapping[str, Any]]) -> str:
    """Return how many cards held more than the forecast, or less by more than 5 %, by kind of case."""
    answered = [record for record in records if record["outcome"] == "answered"]
    cards = [(record, name, card) for record in answered for name, card in record["cards"].items()]
    above = [card for _, _, card in cards if card["peak_bytes"] > card["forecast_bytes"]]
    # The forecast is for a full context, so only full ones tell whether it is too high.
    full = [record for record in answered if record["prompt"] == "full"]
    full_cards = [card for record in full for card in record["cards"].values()]
    lines = [
        f"{len(records)} seeds, {len(answered)} cases, {len(cards)} cards, {len(above)} of them above the forecast",
        f"{len(full)} cases with a full context, {len(full_cards)} cards, {sum(map(_is_near, full_cards))} of them at "
        f"most 5 % below the forecast; all cards of {sum(all(map(_is_near, r['cards'].values())) for r in full)} cases",
        str(dict(Counter(record["outcome"] for record in records))),
    ]
    groups: dict[str, list[tuple[float, float, int]]] = defaultdict(list)
    for record, _name, card in cards:
        if record["prompt"] != "full":
            continue
        context = record["layout"]["context"]
        kinds = [
            f"flash {context['flash_attn']}",
            f"types {record['types']}",
            f"split {record['layout']['split_mode']}",
        ]
        kinds += [f"micro batch {context['n_ubatch']}", f"prompt {record['prompt']}", record["model"]]
        free_bytes = card["forecast_bytes"] - card["peak_bytes"]
        for kind in kinds:
            groups[kind].append((card["forecast_bytes"] / card["peak_bytes"], free_bytes / MIB, record["seed"]))
    for kind, found in sorted(groups.items()):
        low, high = min(found), max(found)
        lines.append(
            f"{kind:24} {len(found):4} cards, forecast {low[0]:.3f} ({low[1]:+,.0f} MiB, seed {low[2]}) to "
            f"{high[0]:.3f} ({high[1]:+,.0f} MiB, seed {high[2]}) of what was held"
        )
    return "\n".join(lines)


def kept(records: Sequence[Mapping[str, Any]]) -> str:
    """Return each tenth case with a full context as lines of JSON, with what its cards held at most."""
    full = [record for record in records if record["outcome"] == "answered" and record["prompt"] == "full"]
    lines = [
        {key: record[key] for key in ("model", "types", "layout")}
        | {"peak_bytes": {name: card["peak_bytes"] for name, card in record["cards"].items()}}
        for record in full[::10]
    ]
    return "".join(json.dumps(line) + "\n" for line in lines)


def _is_near(card: Mapping[str, Any]) -> bool:
    return bool(card["peak_bytes"] <= card["forecast_bytes"] <= 1.05 * card["peak_bytes"])


def main(arguments: Sequence[str] | None = None) -> int:
    """Do the cases, write a record of each, and print a summary; 1 if a card held more than the forecast."""
    parser = new_parser(MODULE, 300)
    parser.add_argument("--again", action="store_true", help="load nothing, but forecast all records again")
    parser.add_argument("--keep", type=Path, help="write what cards held of each tenth case, for the tests")
    options = parser.parse_args(arguments)
    if options.keep is not None:
        options.keep.write_text(kept(read_records(options.out)), encoding="utf-8")
        return 0
    if options.summary:
        print(summary(read_records(options.out)))
        return 0
    if (code := run_with_cards(MODULE, arguments, STAND_IN_CARDS=CARDS, STAND_IN_CONTEXT=CONTEXT_MIB)) is not None:
        return code
    if options.again:
        with TemporaryDirectory() as name:
            rig = parse_rig(command_line("devices"))
            records = [forecast_again(record, Path(name), rig) for record in read_records(options.out)]
        options.out.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
        print(summary(records))
        return 0
    with TemporaryDirectory() as name:
        rig = parse_rig(command_line("devices"))
        records = append_records(options, lambda seed: one_case(seed, Path(name), rig, options.only))
    print(summary(records))
    above = [card for record in records for card in record.get("cards", {}).values()]
    return 1 if any(card["peak_bytes"] > card["forecast_bytes"] for card in above) else 0


if __name__ == "__main__":
    raise SystemExit(main())

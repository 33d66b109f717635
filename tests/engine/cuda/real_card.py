"""Checks on a real NVIDIA card, each with its figures: `python -m tests.engine.cuda.real_card OUT.jsonl [PART ...]`.

The engine with CUDA must be importable (`PYTHONPATH`). Each part writes lines of JSON; an error ends its part alone.

    devices   the list of devices against NVML, and whether listing takes memory of the card
    overhead  memory of a process on the card beyond its buffers, before and after a long prompt
    answers   the forecast against the card's memory in random loads with long prompts (`random_answers`)
    logits    random layouts on three virtual devices and the CPU against the CPU alone; one layout a hundred times
    shortage  memory that runs out in weights, KV cache, compute buffers, and in the middle of an answer
    speed     op offload on and off at half offload, one device against two virtual ones, tensor split, row split
    bench     `bench` of layouts, and predictions before and after it
    examine   `doctor`, and `devices --measure`

One card stands for several (`GGML_CUDA_DEVICES`). Memory is NVML's, of our child processes if the driver tells it.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pynvml

from benchmarks._shapes import FITTED, Shape, Type, llama, write_shape
from engine.base.values import replace
from engine.devices.device import Rig
from engine.devices.rig_file import parse_rig
from engine.model.demo.llama_writer import LlamaShape
from engine.model.gguf.reader import read_model
from engine.planning.plan.plan import Plan
from engine.planning.settings.sampling_settings import SamplingSettings
from engine.runtime.protocol.requests import Generate
from engine.runtime.session.events import Done, Loaded, RequestEnding, Token
from engine.runtime.session.load_spec import LoadSpec
from tests.engine.cuda import random_answers, random_loads
from tests.engine.cuda.random_runs import command_line, plan_of
from tests.support.command_line import run_cli
from tests.support.patience import wait_until
from tests.support.session_log import SessionLog

VIRTUAL = "GGML_CUDA_DEVICES"
LARGE = LlamaShape(32, 4096, 32, 8, 14336, 8192)
"""Shape of an 8B model."""
N_VOCAB = 128256
SMALL = ("window_f16", "mamba_q8_0", "experts_f16", "middle_q4_0", "wide_q8_0")
LONG_PROMPT = "a b c d e f " * 330
STEP_S = 0.01
REPEATS = 100

Write = Callable[..., None]


class Watch:
    """Reads the card's memory in a thread: in use by all processes, and by processes started from this one."""

    def __init__(self) -> None:
        self._handle = pynvml.nvmlDeviceGetHandleByIndex(0)
        self.before_bytes = self._used()
        self.most_bytes = self.before_bytes
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch)

    def __enter__(self) -> Watch:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    @property
    def taken_bytes(self) -> int:
        return self._used() - self.before_bytes

    @property
    def most_taken_bytes(self) -> int:
        return self.most_bytes - self.before_bytes

    def processes(self) -> dict[int, int | None]:
        """Return the bytes of each process on the card by its id, as the driver tells them."""
        return {each.pid: each.usedGpuMemory for each in pynvml.nvmlDeviceGetComputeRunningProcesses(self._handle)}

    def _used(self) -> int:
        return int(pynvml.nvmlDeviceGetMemoryInfo(self._handle).used)

    def _watch(self) -> None:
        while not self._stop.wait(STEP_S):
            self.most_bytes = max(self.most_bytes, self._used())


@contextmanager
def virtual_devices(count: int) -> Iterator[Rig]:
    """Have `count` devices of the one card; yield the rig."""
    if count > 1:
        os.environ[VIRTUAL] = str(count)
    try:
        rig = parse_rig(command_line("devices"))
        # Layouts with a device twice are refused until an examination has tried them; this one tries them too.
        known = [replace(each, capabilities=replace(each.capabilities, repeatable=True)) for each in rig.devices]
        yield replace(rig, devices=tuple(known))
    finally:
        os.environ.pop(VIRTUAL, None)


@contextmanager
def filled(leave_bytes: int) -> Iterator[int]:
    """Have another process take the card's memory but for `leave_bytes`; yield what is free."""
    code = f"from tests.engine.cuda.real_card import fill; fill({leave_bytes})"
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        yield int(process.stdout.readline())
        process.communicate(b"\n")
    handle = pynvml.nvmlDeviceGetHandleByIndex(0)
    # The driver takes the memory back only some time after the end of a process.
    wait_until(lambda: process.pid not in [each.pid for each in pynvml.nvmlDeviceGetComputeRunningProcesses(handle)])


def fill(leave_bytes: int) -> None:
    """Take memory until `leave_bytes` are free, and wait for a line."""
    runtime = ctypes.CDLL("libcudart.so.13")
    free, total, found = ctypes.c_size_t(), ctypes.c_size_t(), ctypes.c_void_p()
    runtime.cudaMemGetInfo(ctypes.byref(free), ctypes.byref(total))
    size = max(free.value - leave_bytes, 0)
    assert size == 0 or runtime.cudaMalloc(ctypes.byref(found), ctypes.c_size_t(size)) == 0
    runtime.cudaMemGetInfo(ctypes.byref(free), ctypes.byref(total))
    print(free.value, flush=True)
    sys.stdin.readline()


def large_model(folder: Path) -> Path:
    """Return the 8B model with random weights, written at the first call."""
    path = folder / "large.gguf"
    if not path.exists():
        write_shape(path, large_shape(), Type.Q4_0)
    return path


def large_shape() -> Shape:
    """Return the 8B model's shape; a smaller one where the variable says so, to try this script on a small machine."""
    if "REAL_CARD_SMALL" in os.environ:
        return llama(LlamaShape(32, 256, 8, 4, 512, 8192), 8192)
    return llama(LARGE, N_VOCAB)


def layout_file(folder: Path, document: Mapping[str, Any]) -> Path:
    path = folder / "layout.json"
    path.write_text(json.dumps(document), encoding="utf-8")
    return path


def on(*runs: tuple[str, int, int], split: str = "layer", **context: Any) -> dict[str, Any]:
    """Return a layout document with `runs`, as (device, first layer, last layer)."""
    rows = [{"device": device, "layers": f"{first}-{last}"} for device, first, last in runs]
    return {"version": 1, "split_mode": split, "runs": rows, "context": context}


# ------------------------------------------------------------------------------------------------------------- parts


def devices(write: Write, _folder: Path, _options: argparse.Namespace) -> None:
    handle = pynvml.nvmlDeviceGetHandleByIndex(0)
    with Watch() as watch:
        began = time.monotonic()
        rig = json.loads(command_line("devices"))
        write(seconds=time.monotonic() - began, taken_bytes=watch.most_taken_bytes, rig=rig)
    memory, slot = pynvml.nvmlDeviceGetMemoryInfo(handle), pynvml.nvmlDeviceGetPciInfo(handle)
    (card,) = [each for each in rig["devices"] if each["backend"] == "CUDA"]
    write(
        nvml={"total_bytes": memory.total, "free_bytes": memory.free, "slot": str(slot.busId)},
        same_total=card["total_bytes"] == memory.total,
        same_free=card["free_bytes"] == memory.free,
        listed=[card["name"], card["pci_bus_id"]],
    )
    with virtual_devices(3) as virtual:
        write(virtual=[[each.id, each.name, each.total_bytes, each.pci_bus_id] for each in virtual.devices])


def examine(write: Write, _folder: Path, _options: argparse.Namespace) -> None:
    for words in (["doctor"], ["devices", "--measure"]):
        began = time.monotonic()
        answer = run_cli(*words)
        write(words=words, code=answer.code, seconds=time.monotonic() - began, out=answer.out, err=answer.err[-6000:])


def overhead(write: Write, folder: Path, _options: argparse.Namespace) -> None:
    for name in SMALL[:2]:
        path = write_shape(folder / f"{name}.gguf", *FITTED[name])
        model = read_model(path)
        rig = parse_rig(command_line("devices"))
        for context in ({"flash_attn": "on"}, {"flash_attn": "off"}):
            plan = plan_of(on(("CUDA0", 0, model.n_layers - 1), n_ctx=4096, **context), model, rig)
            assert isinstance(plan, Plan), plan
            with Watch() as watch, SessionLog() as log:
                log.session.load(LoadSpec(plan))
                (loaded,) = log.wait_for_endings(1)
                assert isinstance(loaded, Loaded), loaded
                after = watch.taken_bytes
                processes = watch.processes()
                log.session.ask(Generate(prompt=LONG_PROMPT, max_tokens=4, seed=1))
                log.wait_until(lambda: any(isinstance(each, RequestEnding) for each in log.endings[1:]))
                answered, most = watch.taken_bytes, watch.most_taken_bytes
            held = {row.id: row for row in loaded.devices}["CUDA0"]
            told = {row.id: row for row in loaded.forecast}["CUDA0"]
            buffers = held.weights_bytes + held.kv_cache_bytes + held.recurrent_bytes + held.compute_bytes
            buffers += held.output_bytes
            write(
                model=name, context=context, buffers_bytes=buffers, loaded_bytes=after, answered_bytes=answered,
                most_bytes=most, overhead_bytes=after - buffers, during_bytes=most - after, processes=processes,
                forecast_overhead_bytes=told.overhead_bytes, forecast_answering_bytes=told.answering_bytes,
                forecast_bytes=told.need_bytes, seconds=loaded.seconds,
                ending=type(log.endings[-1]).__name__,
            )  # fmt: skip


def answers(write: Write, folder: Path, options: argparse.Namespace) -> None:
    rig = parse_rig(command_line("devices"))
    limit_bytes = options.most << 30
    end = time.monotonic() + options.seconds
    for seed in range(options.first, options.first + options.number):
        if time.monotonic() > end:
            break
        rng = random.Random(f"answers {seed}")
        name = rng.choice(random_answers.text_models())
        kind = rng.choice(["as it is", "as it is", *random_answers.KINDS])
        if name in random_answers.SLOW:
            continue
        path = random_answers.write_model(folder / f"{name}.gguf", name, random_answers.KINDS[kind])
        try:
            if path.stat().st_size > limit_bytes:
                continue
            model = read_model(path)
            document, length = random_answers.random_case(rng, model, [device.id for device in rig.devices])
            record: dict[str, Any] = {"seed": seed, "model": name, "types": kind, "prompt": length}
            plan = plan_of(document, model, rig)
            if not isinstance(plan, Plan):
                write(**record, **plan)
                continue
            write(**record, layout=document, **one_answer(plan, length))
        finally:
            path.unlink()


def one_answer(plan: Plan, length: str) -> dict[str, Any]:
    """Load a plan and ask it; return what the card's processes took, and the forecast."""
    began = time.monotonic()
    with Watch() as watch, SessionLog() as log:
        log.session.load(LoadSpec(plan))
        (loaded,) = log.wait_for_endings(1)
        if not isinstance(loaded, Loaded):
            return {"outcome": type(loaded).__name__, "what": getattr(loaded, "message", "")}
        after, seconds = watch.taken_bytes, time.monotonic() - began
        n_sequences = (plan.settings.n_seq_max or 1) if length == "full" else 1
        room = (plan.settings.n_ctx or 0) // (plan.settings.n_seq_max or 1) - 8
        asked = 0 if length == "none" else n_sequences
        for _ in range(asked):
            log.session.ask(Generate(prompt=" a" * (room if length == "full" else min(room, 300)), max_tokens=3))
        log.wait_until(lambda: sum(isinstance(each, RequestEnding) for each in log.endings[1:]) >= asked)
        endings = sorted({type(each).__name__ for each in log.endings[1:]})
        most = watch.most_taken_bytes
        last = log.endings[-1]
    (row,) = [row for row in loaded.forecast if row.id == "CUDA0"]
    (held,) = [row for row in loaded.devices if row.id == "CUDA0"]
    parts = ("weights_bytes", "kv_cache_bytes", "recurrent_bytes", "compute_bytes", "output_bytes")
    off = {part: [getattr(row, part), getattr(held, part)] for part in parts}
    return {
        "outcome": "/".join(endings) or "Loaded",
        "what": getattr(last, "message", ""),
        "seconds": [seconds, time.monotonic() - began],
        "forecast_bytes": row.need_bytes,
        "loaded_bytes": after,
        "most_bytes": most,
        "rows_bytes": sum(getattr(held, part) for part in parts),
        "overhead_bytes": row.overhead_bytes,
        "answering_bytes": row.answering_bytes,
        "off": {part: pair for part, pair in off.items() if pair[0] != pair[1]},
        "prompt_per_second": last.prompt_tokens_per_second if isinstance(last, Done) else None,
        "answer_per_second": last.generation_tokens_per_second if isinstance(last, Done) else None,
    }


def logits(write: Write, folder: Path, options: argparse.Namespace) -> None:
    paths = [write_shape(folder / f"{name}.gguf", *FITTED[name]) for name in SMALL]
    models = {path.stem: read_model(path) for path in paths}
    end = time.monotonic() + options.seconds
    with virtual_devices(3) as rig:
        if options.first == 1:
            hundred(write, models["middle_q4_0"], rig)
        for seed in range(options.first, options.first + options.number):
            if time.monotonic() > end:
                break
            rng = random.Random(f"logits {seed}")
            name = rng.choice(SMALL)
            model = models[name]
            document = random_loads.random_layout(rng, model.n_layers, [device.id for device in rig.devices])
            prompt = "the quick brown fox " * rng.choice([1, 4, 12])
            record = {"seed": seed, "model": name, "layout": document, "prompt": len(prompt)}
            plan = plan_of(document, model, rig)
            if not isinstance(plan, Plan):
                write(**record, **plan)
                continue
            cpu = dict(document["context"])
            if document["split_mode"] == "tensor" and cpu.get("flash_attn") == "auto":
                cpu["flash_attn"] = "on"
            base = on(("CPU", 0, model.n_layers - 1), **{**cpu, "op_offload": False, "offload_kqv": False})
            reference = plan_of(base, model, rig)
            assert isinstance(reference, Plan), reference
            before, after = probabilities(reference, prompt), probabilities(plan, prompt)
            write(**record, **compared(before, after))


def hundred(write: Write, model: Any, rig: Rig) -> None:
    """Ask a layout with a repeated device a hundred times, each time with an empty cache."""
    document = on(("CUDA0", 0, 6), ("CPU", 7, 9), ("CUDA0", 10, 14), ("CUDA1", 15, 19), n_ctx=1024)
    plan = plan_of(document, model, rig)
    if not isinstance(plan, Plan):
        write(hundred=plan)
        return
    seen: list[Any] = []
    with SessionLog() as log:
        log.session.load(LoadSpec(plan))
        (loaded,) = log.wait_for_endings(1)
        assert isinstance(loaded, Loaded), loaded
        for at in range(REPEATS):
            mark = len(log.events)
            # The first character differs every other time, so that no prompt begins with what is in the cache.
            log.session.ask(generate(f"{'ab'[at % 2]} quick brown fox " * 4))
            log.wait_until(lambda wanted=at + 1: len(log.endings) > wanted)  # type: ignore[misc]
            seen.append(choices(log.events[mark:]))
    write(hundred={"asked": len(seen), "different": len({json.dumps(each) for each in seen}), "expected": 2})


def generate(prompt: str) -> Generate:
    return Generate(prompt=prompt, max_tokens=6, sampling=SamplingSettings(temperature=0.0, alternatives=10, seed=1))


def choices(events: Sequence[Any]) -> list[Any]:
    """Return token, probability and the likeliest tokens of each step."""
    return [
        [choice.text, choice.probability, [list(each) for each in choice.likeliest]]
        for event in events
        if isinstance(event, Token)
        for choice in event.choices
    ]


def probabilities(plan: Plan, prompt: str) -> list[Any] | str:
    """Load a plan and return the choices of an answer, or how the load ended."""
    with SessionLog() as log:
        log.session.load(LoadSpec(plan))
        (loaded,) = log.wait_for_endings(1)
        if not isinstance(loaded, Loaded):
            return f"{type(loaded).__name__}: {getattr(loaded, 'message', '')}"
        log.session.ask(generate(prompt))
        log.wait_for_endings(2)
        if not isinstance(log.endings[1], Done):
            return f"{type(log.endings[1]).__name__}: {getattr(log.endings[1], 'message', '')}"
        return choices(log.events)


def compared(before: list[Any] | str, after: list[Any] | str) -> dict[str, Any]:
    """Return how far the probabilities of the first token differ, and how many greedy tokens agree."""
    if isinstance(before, str) or isinstance(after, str) or not before or not after:
        return {"outcome": "failed", "before": before, "after": after}
    first, second = dict(map(tuple, before[0][2])), dict(map(tuple, after[0][2]))
    both = first.keys() & second.keys()
    ratios = [abs(first[key] / second[key] - 1) for key in both]
    same = next((at for at, (a, b) in enumerate(zip(before, after, strict=False)) if a[0] != b[0]), len(before))
    return {
        "outcome": "compared", "shared": len(both), "most_off": max(ratios, default=None), "same_tokens": same,
        "likeliest": list(first.items())[:2],
    }  # fmt: skip


def shortage(write: Write, folder: Path, _options: argparse.Namespace) -> None:
    path = large_model(folder)
    last = read_model(path).n_layers - 1
    cases: list[tuple[str, dict[str, Any], Callable[[Mapping[str, int]], float]]] = [
        ("weights", {}, lambda row: row["overhead_bytes"] + 0.9 * row["weights_bytes"]),
        (
            "kv", {"n_ctx": 65536},
            lambda row: row["overhead_bytes"] + row["weights_bytes"] + 0.5 * row["kv_cache_bytes"],
        ),
        (
            "compute", {"n_ctx": 8192, "n_batch": 4096, "n_ubatch": 4096, "flash_attn": "off"},
            lambda row: row["need_bytes"] - row["answering_bytes"] - 0.7 * row["compute_bytes"],
        ),
        (
            "answer", {"n_ctx": 8192, "n_ubatch": 2048, "flash_attn": "off"},
            lambda row: row["need_bytes"] - 0.6 * row["answering_bytes"],
        ),
    ]  # fmt: skip
    for name, context, leave in cases:
        layout = layout_file(folder, on(("CUDA0", 0, last), **context))
        (row,) = [
            row
            for row in run_cli("plan", path, "--layout", layout, "--json").document["devices"]
            if row["id"] == "CUDA0"
        ]
        prompt = ["--prompt", LONG_PROMPT, "-n", "4"]
        with filled(int(leave(row))) as free_bytes:
            answer = run_cli("load", path, "--layout", layout, "--json", *prompt)
        again = run_cli("load", path, "--layout", layout, "--json", *prompt)
        write(case=name, row=row, free_bytes=free_bytes, code=answer.code, ending=answer.events[-1], err=answer.err,
              kinds=[event["event"] for event in answer.events if event["event"] not in ("token", "progress")],
              again=again.events[-1])  # fmt: skip


def speed(write: Write, folder: Path, _options: argparse.Namespace) -> None:
    path = large_model(folder)
    last = read_model(path).n_layers - 1
    half = last // 2
    whole, part = on(("CUDA0", 0, last), n_ctx=8192), on(("CPU", 0, half), ("CUDA0", half + 1, last), n_ctx=8192)
    two = on(("CUDA0", 0, half), ("CUDA1", half + 1, last), n_ctx=8192)
    tensor = {**on(("CUDA0", 0, last), split="tensor", n_ctx=8192, flash_attn="on")}
    tensor["tensor_split"] = {"CUDA0": 1, "CUDA1": 1}
    row = on(("CUDA0", 0, last), split="row", n_ctx=8192)
    row["tensor_split"] = {"CUDA0": 1, "CUDA1": 1}
    cases = [
        ("one device", 1, whole), ("half, op offload", 1, part),
        ("half, no op offload", 1, {**part, "context": {**part["context"], "op_offload": False}}),
        ("two virtual devices", 2, two), ("tensor split", 2, tensor), ("row split", 2, row), ("one device", 1, whole),
    ]  # fmt: skip
    for name, count, document in cases:
        with virtual_devices(count):
            layout = layout_file(folder, document)
            plan = run_cli("plan", path, "--layout", layout, "--json")
            told = {key: plan.document.get(key) for key in ("fits", "violations", "speed", "error", "advice")}
            began = time.monotonic()
            answer = run_cli("load", path, "--layout", layout, "--json", "--prompt", LONG_PROMPT, "-n", "64")
            seconds = time.monotonic() - began
            events = answer.events if answer.out.startswith('{"event"') else [json.loads(answer.out or "{}")]
            ending = events[-1]
            loaded = [event for event in events if event.get("event") == "loaded"]
            stages = loaded[0].get("seconds") if loaded else None
            write(case=name, told=told, ending=ending, seconds=seconds, stages=stages, err=answer.err[-800:])


def bench(write: Write, folder: Path, _options: argparse.Namespace) -> None:
    path = large_model(folder)
    last = read_model(path).n_layers - 1
    layouts: list[str] = []
    for name, document in (
        ("whole", on(("CUDA0", 0, last), n_ctx=8192)),
        ("three-quarters", on(("CPU", 0, last // 4), ("CUDA0", last // 4 + 1, last), n_ctx=8192)),
    ):
        file = folder / f"{name}.layout.json"
        file.write_text(json.dumps(document), encoding="utf-8")
        layouts += ["--layout", str(file)]
    began = time.monotonic()
    answer = run_cli("bench", path, *layouts, "--quick", "--answer-tokens", "32", "--json")
    write(code=answer.code, seconds=time.monotonic() - began, out=answer.out, err=answer.err[-2000:])
    told = run_cli("plan", path, *layouts[:2], "--json").document.get("speed")
    write(after=told)


PARTS = {each.__name__: each for each in (devices, overhead, answers, logits, shortage, speed, bench, examine)}


def main(arguments: Sequence[str] | None = None) -> int:
    """Do the parts; 1 if one of them failed."""
    parser = argparse.ArgumentParser(prog="python -m tests.engine.cuda.real_card")
    parser.add_argument("out", type=Path, help="results are appended as lines of JSON")
    parser.add_argument("parts", nargs="*", help=f"of {', '.join(PARTS)}; all where none is named")
    parser.add_argument("--first", type=int, default=1, help="the first seed")
    parser.add_argument("--number", type=int, default=10_000, help="seeds")
    parser.add_argument("--seconds", type=float, default=60.0, help="longest time for random cases")
    parser.add_argument("--most", type=int, default=16, help="largest file of random cases, in GiB")
    parser.add_argument("--folder", type=Path, help="keeps large models for the next run")
    options = parser.parse_args(arguments)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    pynvml.nvmlInit()
    failed = 0
    with TemporaryDirectory() as name, options.out.open("a", encoding="utf-8") as out:
        for part in options.parts or PARTS:

            def write(part: str = part, **values: Any) -> None:
                out.write(json.dumps({"part": part, **values}, default=str) + "\n")
                out.flush()

            began = time.monotonic()
            try:
                PARTS[part](write, options.folder or Path(name), options)
            # Time on a card is scarce: the other parts still run, and the traceback is in the results.
            except Exception:
                failed += 1
                write(error=traceback.format_exc())
            write(ended=round(time.monotonic() - began, 2))
            with suppress(ValueError):
                print(part, round(time.monotonic() - began, 1), "s", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    raise SystemExit(main())

"""Time of a drag step, of opening a model, and of the first layout, for 126 layers on 8 devices.

The model is built in memory with the shapes of Llama 3.1 405B. In each of 2,000 steps a boundary moves by one layer,
and the forecast, rules and fit of the layout are computed. Printed are milliseconds of the wall clock: median and 99 %
quantile of the steps, opening, first step, a change of the context, and the first layout.

Then the same steps are measured for well-known models of `tests/zoo` on 2 and on 7 devices, the latter also with all
experts on the CPU. Each boundary is dragged over all positions, so that each layout is new: median and 90 % quantile.
The last line is one JSON object.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable, Iterator
from functools import partial
from itertools import pairwise
from pathlib import Path

from engine.base.units import GIB
from engine.devices.device import CPU_ID, Device, Rig, make_host
from engine.model.gguf.model_file import MetadataValue, ModelFile, TensorInfo, group_blocks
from engine.planning.fit.strategies.fastest import initial_layout
from engine.planning.layout.layout import Layout, Override, Run
from engine.planning.plan.edit import Edit
from engine.planning.plan.plan import Plan
from engine.planning.plan.preview import Preview, PreviewCache, make_preview
from engine.planning.settings.context_settings import ContextSettings
from tests.support.truth import truth_model

LAYERS = 126
DEVICES = 7
STEPS = 2000
N_EMBD, N_FF, N_KV, N_VOCAB = 16384, 53248, 1024, 128256
_SHAPES = {
    "attn_norm": (N_EMBD,),
    "attn_q": (N_EMBD, N_EMBD),
    "attn_k": (N_EMBD, N_KV),
    "attn_v": (N_EMBD, N_KV),
    "attn_output": (N_EMBD, N_EMBD),
    "ffn_norm": (N_EMBD,),
    "ffn_gate": (N_EMBD, N_FF),
    "ffn_up": (N_EMBD, N_FF),
    "ffn_down": (N_FF, N_EMBD),
}


def build_model() -> ModelFile:
    """Return a model of `LAYERS` layers in Q4_K, with the tensors of a llama model."""
    tensors: list[TensorInfo] = []
    offset = 0
    names = [(f"blk.{block}.{stem}.weight", shape) for block in range(LAYERS) for stem, shape in _SHAPES.items()]
    matrix = (N_EMBD, N_VOCAB)
    names += [("token_embd.weight", matrix), ("output_norm.weight", (N_EMBD,)), ("output.weight", matrix)]
    for name, shape in names:
        count = shape[0] * (shape[1] if len(shape) == 2 else 1)
        size_bytes = count * 4 if len(shape) == 1 else count // 256 * 144
        tensors.append(TensorInfo(name, shape, "F32" if len(shape) == 1 else "Q4_K", size_bytes, 0, offset))
        offset += size_bytes
    blocks, others = group_blocks(tensors, LAYERS)
    metadata: dict[str, MetadataValue] = {
        "general.architecture": "llama",
        "llama.context_length": 131072,
        "llama.embedding_length": N_EMBD,
        "llama.attention.head_count": 128,
        "llama.attention.head_count_kv": 8,
    }
    return ModelFile(
        paths=(Path("model.gguf"),),
        version=3,
        architecture="llama",
        name="405B",
        metadata=metadata,
        tensors=tuple(tensors),
        blocks=blocks,
        global_tensors=others,
        n_vocab=N_VOCAB,
        size_bytes=offset,
    )


def build_layout(moved: int) -> Layout:
    """Return a layout over the CPU and all devices, in which `moved` layers of the first device are on the CPU."""
    on_cpu, each = 14 + moved, 16
    runs = [Run(CPU_ID, 0, on_cpu - 1), Run("G0", on_cpu, 14 + each - 1)]
    runs += [Run(f"G{place}", 14 + place * each, 14 + (place + 1) * each - 1) for place in range(1, DEVICES)]
    return Layout(LAYERS, tuple(runs), f"G{DEVICES - 1}")


ZOO = (
    "deepseek-v3", "falcon-mamba-7b", "gemma-3-4b", "gpt-oss-20b", "granite-4.0-h-small", "jamba-v0.1-52b",
    "nemotron-nano-9b-v2", "qwen3-30b-a3b",
)  # fmt: skip
EXPERTS = Override(CPU_ID, pattern=r"\.ffn_(up|down|gate)_exps")


def drags(n_layers: int, n_devices: int, overrides: tuple[Override, ...]) -> Iterator[Layout]:
    """Yield an even layout, then the layouts of a drag of each boundary over all positions between its neighbours."""
    even = [n_layers * place // n_devices for place in range(n_devices + 1)]
    yield _cut(even, overrides)
    for place in range(1, n_devices):
        for cut in range(even[place - 1] + 1, even[place + 1]):
            if cut != even[place]:
                yield _cut([*even[:place], cut, *even[place + 1 :]], overrides)


def _cut(cuts: list[int], overrides: tuple[Override, ...]) -> Layout:
    runs = tuple(Run(f"G{place}", first, end - 1) for place, (first, end) in enumerate(pairwise(cuts)))
    return Layout(cuts[-1], runs, runs[-1].device, overrides=overrides)


def measure_zoo(rig: Rig, context: ContextSettings) -> dict[str, dict[str, float]]:
    """Return the times of steps to new layouts, by model, number of devices and overrides."""
    found = {}
    for name in ZOO:
        for n_devices, overrides in ((2, ()), (DEVICES, ()), (DEVICES, (EXPERTS,))):
            tables = PreviewCache(truth_model(name))
            layouts = drags(tables.memory.model.n_layers, n_devices, overrides)
            times = [milliseconds(partial(step, tables, rig, layout, context)) for layout in layouts]
            first, *steps = times
            steps.sort()
            label = f"{name} on {n_devices}" + (", experts on CPU" if overrides else "")
            found[label] = {
                "first_ms": round(first, 2),
                "new_step_median_ms": round(statistics.median(steps), 3),
                "new_step_90_percent_ms": round(steps[len(steps) * 9 // 10], 3),
            }
            print(f"{label}: {found[label]}", flush=True)
    return found


def step(tables: PreviewCache, rig: Rig, layout: Layout, context: ContextSettings) -> Preview:
    """Compute the preview of a layout, as a step of a drag does."""
    return make_preview(tables, Plan(tables.memory, rig, Edit(layout, context)))


def milliseconds(work: Callable[[], object]) -> float:
    """Call `work`; return its milliseconds by the wall clock."""
    started = time.perf_counter()
    work()
    return (time.perf_counter() - started) * 1000


def main() -> None:
    """Measure and print."""
    model = build_model()
    rig = Rig(
        tuple(Device(f"G{place}", f"card {place}", "CUDA", "gpu", 48 * GIB) for place in range(DEVICES)),
        make_host("host", 512 * GIB),
    )
    context = ContextSettings(n_ctx=32768)
    layouts = [build_layout(moved) for moved in range(8)]
    tables = PreviewCache(model)
    open_ms = milliseconds(lambda: PreviewCache(model))
    first_ms = milliseconds(lambda: step(tables, rig, layouts[0], context))
    steps = [
        milliseconds(partial(step, tables, rig, layouts[moved % len(layouts)], context))
        for moved in range(1, STEPS + 1)
    ]
    contexts = [ContextSettings(n_ctx=4096 + 256 * step) for step in range(50)]
    context_steps = [milliseconds(partial(step, tables, rig, layouts[0], changed)) for changed in contexts]
    initial_ms = milliseconds(lambda: initial_layout(tables.memory, rig, context))
    ordered = sorted(steps)
    result: dict[str, object] = {
        "benchmark": "plan_time",
        "layers": LAYERS,
        "devices": DEVICES + 1,
        "open_ms": round(open_ms, 3),
        "first_step_ms": round(first_ms, 3),
        "step_median_ms": round(statistics.median(steps), 4),
        "step_99_percent_ms": round(ordered[len(ordered) * 99 // 100], 4),
        "context_change_median_ms": round(statistics.median(context_steps), 3),
        "initial_layout_ms": round(initial_ms, 3),
    }
    print(
        f"open {result['open_ms']} ms, first step {result['first_step_ms']} ms, step {result['step_median_ms']} ms"
        f" (99 %: {result['step_99_percent_ms']} ms), other context {result['context_change_median_ms']} ms"
    )
    result["zoo"] = measure_zoo(rig, context)
    print(json.dumps(result))


if __name__ == "__main__":
    main()

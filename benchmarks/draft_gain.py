"""What drafts gain on a real model: acceptance, tokens per step, and speed against the same answers without drafts.

    python -m benchmarks.draft_gain [--model FILE.gguf] [--draft FILE.gguf] [--keep 0-7,24-29] [--as Q4_0]
        [--tokens 120] [--rounds 3] [--threads 1] [--drafted 4] [--kinds ngram,model] [--prompts story,quote]

Children hold the model: one without drafts, and one for each of --kinds. They answer each prompt in turn, so that what
else the machine does hits all; ratios are medians of those of each turn. "gain_cpu" is that of the processor time,
which says more with one thread on a busy machine. "told" is the gain that the child measures
itself. Kinds that begin with "fixed-" draft --drafted tokens at each step, without a choice or a pause. Without --draft
the draft model is made here: the same model with the layers of --keep only, and with weights of type --as. The last
line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import statistics
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from itertools import count
from pathlib import Path
from typing import NamedTuple

import gguf
import msgspec

from benchmarks._children import TIMEOUT_S, OurChild, load_request, our_child
from engine.planning.settings.sampling_settings import SamplingSettings
from engine.runtime.process.blocking_child import request_child
from engine.runtime.protocol.messages import Generated, Hello, LoadedModel, Piece, Quantised, Reading, StageProgress
from engine.runtime.protocol.requests import ChatMessage, DraftSource, Generate, Load, Quantise
from resources.setup.demo_model import DEMO_MODEL

N_CTX = 2048
_CODE = """def add(numbers):
    total = 0
    for number in numbers:
        total = total + number
    return total

def largest(numbers):
    best = numbers[0]
    for number in numbers:
        if number > best:
            best = number
    return best
"""
_LIST = "1. apples\n2. bananas\n3. cherries\n4. dates\n5. elderberries\n6. figs\n7. grapes\n8. honeydew melons"
_TEXT = """The old harbour of the town lies at the mouth of the river. In summer many boats come from the north, and the
fishermen sell there catch on the quay. In winter only a few ships stay, becuase the ice makes the way dangerous. The
lighthouse was build in 1871 and still guides the ships at night. Visitors can climb its 144 steps."""
PROMPTS = {
    "story": "Write a short story about a dog.",
    "explain": "Explain in simple words what a tree is.",
    "code": "Write a Python class for a stack with push, pop and peek, then the same class with type hints.",
    "quote": "Repeat this text three times: The quick brown fox jumps over the lazy dog near the river bank.",
    "spelling": f"Correct the spelling of this text and give all of it back:\n\n{_TEXT}",
    "list": f'Add "9. kiwis" to the end of this list and give back the whole list:\n\n{_LIST}',
    "edit": f"Give back this code with a docstring in each function:\n\n{_CODE}",
    "quotes": f"Sum up this text, and quote two of its sentences word for word:\n\n{_TEXT}",
}
_BLOCK = re.compile(r"blk\.(\d+)\.")
_numbers = count(1)


class MeasuredAnswer(NamedTuple):
    """An answer. `seconds`: processor time of the child from the first text to the end."""

    text: str
    done: Generated
    seconds: float


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", type=Path, default=Path.home() / ".cache/layerdeck/models" / DEMO_MODEL)
    parser.add_argument("--draft", type=Path)
    parser.add_argument("--keep", default="0-7,24-29", help="layers of the draft model")
    parser.add_argument("--as", dest="file_type", default="", help="file type of the draft model, as Q4_0")
    parser.add_argument("--tokens", type=int, default=120)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--drafted", type=int, default=4)
    parser.add_argument("--kinds", default="ngram,model", help="of ngram, model, fixed-ngram, fixed-model")
    parser.add_argument("--prompts", default=",".join(PROMPTS), help="some of: " + ", ".join(PROMPTS))
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        draft = options.draft or write_part(options.model, Path(folder) / "draft.gguf", layers_of(options.keep))
        if options.file_type:
            draft = quantised(draft, Path(folder) / "quantised.gguf", options.file_type)
        load = load_request(options.model, load_mode="mmap", n_ctx=N_CTX, threads=options.threads)
        small = load_request(draft, load_mode="mmap", n_ctx=N_CTX, threads=options.threads)
        children = {}
        for kind in ("none", *options.kinds.split(",")):
            source = DraftSource(
                kind="ngram" if kind.endswith("ngram") else "model",
                n_tokens=options.drafted,
                pauses=not kind.startswith("fixed-"),
                path=str(draft),
                parameters=small.parameters,
                context=small.context,
            )
            children[kind] = stack.enter_context(our_child())
            begin(children[kind], msgspec.structs.replace(load, draft=None if kind == "none" else source))
            ask(children[kind], "Hello", 8)
        names = options.prompts.split(",")
        rows = [row for name in names for row in measure(children, name, options.tokens, options.rounds)]
    settings = {name: str(value) for name, value in vars(options).items()}
    print(json.dumps({"benchmark": "draft_gain", "rows": rows, **settings}))


def measure(children: dict[str, OurChild], name: str, tokens: int, rounds: int) -> list[dict[str, object]]:
    """Ask all children for the greedy answer to a prompt in turn; print and return the row of each kind of draft."""
    answers: dict[str, list[MeasuredAnswer]] = {kind: [] for kind in children}
    for number in range(rounds):
        kinds = list(children)[number % len(children) :] + list(children)[: number % len(children)]
        for kind in kinds:
            answers[kind].append(ask(children[kind], PROMPTS[name], tokens))
    rows: list[dict[str, object]] = []
    for kind in list(children)[1:]:
        pairs = list(zip(answers["none"], answers[kind], strict=True))
        ratios = [seconds_per_token(without.done) / seconds_per_token(each.done) for without, each in pairs]
        told = [each.done.draft for each in answers[kind] if each.done.draft is not None]
        drafted, accepted = (sum(getattr(each, f"{what}_tokens") for each in told) for what in ("drafted", "accepted"))
        steps = sum(each.steps for each in told)
        gains = [each.gain for each in told if each.gain is not None]
        row: dict[str, object] = {
            "prompt": name,
            "draft": kind,
            "same": {each.text for each in answers[kind]} == {each.text for each in answers["none"]},
            "acceptance": round(accepted / drafted, 3) if drafted else None,
            "tokens_per_step": round((steps + accepted) / steps, 2) if steps else None,
            "gain": round(statistics.median(ratios), 3),
            "gain_cpu": round(statistics.median(without.seconds / each.seconds for without, each in pairs), 3),
            "told": round(statistics.median(gains), 3) if gains else None,
            "paused": sorted({each.paused for each in told} - {""}),
        }
        print(" ".join(f"{key} {value}" for key, value in row.items()), flush=True)
        rows.append(row)
    return rows


def seconds_per_token(done: Generated) -> float:
    """Return the seconds of a token after the first, whose time is that of the prompt."""
    return done.generation_seconds / max(1, done.generated_tokens - 1)


def begin(child: OurChild, load: Load) -> None:
    """Load a model in a child."""
    child.send(load)
    while not isinstance(message := child.message(), LoadedModel):
        if not isinstance(message, Hello | StageProgress):
            raise RuntimeError(f"the load failed: {message}")


def ask(child: OurChild, prompt: str, tokens: int) -> MeasuredAnswer:
    """Return a greedy answer."""
    sampling = SamplingSettings(temperature=0.0, max_tokens=tokens)
    child.send(Generate(id=next(_numbers), messages=(ChatMessage("user", prompt),), sampling=sampling))
    text, begun = "", 0.0
    while not isinstance(message := child.message(), Generated):
        if isinstance(message, Piece):
            begun = begun or processor_seconds(child.pid)
            text += message.text
        elif not isinstance(message, Reading):
            raise RuntimeError(f"the answer failed: {message}")
    return MeasuredAnswer(text, message, processor_seconds(child.pid) - begun)


def processor_seconds(pid: int) -> float:
    """Return the processor time of a process so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def layers_of(text: str) -> list[int]:
    """Return the layers of a list such as `0-7,24-29`."""
    found: list[int] = []
    for part in text.split(","):
        first, _, last = part.partition("-")
        found += range(int(first), int(last or first) + 1)
    return found


def quantised(model: Path, path: Path, file_type: str) -> Path:
    """Write a model with weights of another type; return `path`."""
    request_child(Quantise(path=str(model), target=str(path), file_type=file_type), Quantised, timeout_s=TIMEOUT_S)
    return path


def write_part(model: Path, path: Path, layers: Sequence[int]) -> Path:
    """Write a model that has only some layers of another one; return `path`."""
    whole = gguf.GGUFReader(model)
    architecture = str(whole.fields["general.architecture"].contents())
    writer = gguf.GGUFWriter(path, architecture)
    for key, field in whole.fields.items():
        if key == f"{architecture}.block_count":
            writer.add_block_count(len(layers))
        elif not key.startswith(("GGUF.", "general.architecture")):
            sub_type = field.types[1] if len(field.types) > 1 else None
            writer.add_key_value(key, field.contents(), field.types[0], sub_type)
    for tensor in whole.tensors:
        name, block = tensor.name, _BLOCK.match(tensor.name)
        if block is not None:
            if int(block[1]) not in layers:
                continue
            name = name.replace(block[0], f"blk.{layers.index(int(block[1]))}.", 1)
        writer.add_tensor(name, tensor.data, raw_dtype=tensor.tensor_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


if __name__ == "__main__":
    main()

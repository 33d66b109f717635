"""Loads and answers of damaged model files: each must end in time, and a crash must be reported with the file's name.

    python -m benchmarks.mutated_loads OUT.jsonl [--cases 5000] [--seed 1] [--only CASE]

A case takes the header of a small recorded model (`tests/zoo`), adds a vocabulary, and changes up to three values,
tensors or tokens at random. The weights are zeros or random. The file is read, planned, loaded by the real engine, and
asked with a chat and with a raw prompt. OUT.jsonl gets a line for each case; a second call with the same file continues
after its last line.

Goals: no step takes over 30 s, each ends, and the message of each crash names the file. Otherwise the exit code is 1.
The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import gzip
import json
import random
import struct
import sys
import tempfile
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

from engine.base.errors import EngineError
from engine.devices.device import CPU_ID, Rig
from engine.machines.rigs.discovery import host_device
from engine.model.gguf.reader import read_model
from engine.planning.layout.layout import single_device
from engine.planning.memory.model_memory import ModelMemory
from engine.planning.plan.edit import Edit
from engine.planning.plan.plan import Plan
from engine.planning.settings.context_settings import ContextSettings
from engine.runtime.protocol.requests import ChatMessage, Generate
from engine.runtime.session.driver import SessionUpdate
from engine.runtime.session.events import AnyEvent, Attempt, Crashed, Fallback, Loaded, Progress, Reading, Token
from engine.runtime.session.load_spec import LoadSpec
from engine.runtime.session.session import ModelSession
from tests.support.mutation import Header, Pair, mutate_header
from tests.zoo.pack import FOLDER, read_document

STALL_S, LIMIT_S = 30.0, 240.0
LARGEST_BYTES = 12 << 20
CONTEXT = ContextSettings(n_ctx=256, n_batch=64, n_ubatch=64, threads=1, threads_batch=1)
PROMPTS = (
    Generate(messages=(ChatMessage("user", "ab < b\u00e9 <s>\n\u4e16"),), max_tokens=4),
    Generate(prompt="ab a < b <|x|>", max_tokens=4),
)
TOKENIZERS = ("gpt2", "llama", "bert", "rwkv", "t5", "plamo2")
CHANGED_TOKENIZER = 0.2
RANDOM_WEIGHTS = 0.3


class Cases:
    """Writes the model file of each seed, from the recorded headers of small models."""

    def __init__(self) -> None:
        self.names = tuple(
            sorted(
                name
                for path in (FOLDER / "truth").iterdir()
                if read_document(name := path.name.removesuffix(".json.gz"))["size_bytes"] < LARGEST_BYTES
            )
        )

    def write(self, folder: Path, seed: int) -> tuple[Path, str]:
        """Write the file of a case; return its path, and the name of the recorded header."""
        numbers = random.Random(f"load {seed}")
        name = numbers.choice(self.names)
        header = Header(gzip.decompress((FOLDER / "headers" / f"{name}.gguf.head.gz").read_bytes()))
        _give_vocabulary(header, numbers)
        for _ in range(numbers.choice((0, 1, 1, 1, 2, 3))):
            mutate_header(header, numbers)
        encoded = header.encode()
        path = folder / f"case-{seed}.gguf"
        with path.open("wb") as file:
            file.write(encoded)
            size = min(header.size_bytes, 4 * LARGEST_BYTES)
            start = -(-len(encoded) // 32) * 32
            if numbers.random() < RANDOM_WEIGHTS:
                file.seek(start)
                file.write(numbers.randbytes(min(size, LARGEST_BYTES)))
            file.truncate(start + size + 64)
        return path, name


def _give_vocabulary(header: Header, numbers: random.Random) -> None:
    """Replace the vocabulary by one that tokenizes any text, with as many tokens as the token embedding has rows."""
    n_vocab = next((row.shape[-1] for row in header.rows if row.name == b"token_embd.weight"), 128)
    kind = numbers.choice(TOKENIZERS) if numbers.random() < CHANGED_TOKENIZER else "gpt2"
    letters = [chr(code) for code in range(33, 127)] + ["\u0120", "\u010a", "<0x0A>", "<s>", "</s>", "<unk>"]
    tokens = [*letters, *(f"t{number}" for number in range(n_vocab))][:n_vocab]
    kinds = [6 if each.startswith("<0x") else 3 if each in ("<s>", "</s>", "<unk>") else 1 for each in tokens]
    header.pairs = [pair for pair in header.pairs if not pair.key.startswith(b"tokenizer.")]
    ends = tokens.index("</s>") if "</s>" in tokens else 0
    header.pairs += [
        Pair(b"tokenizer.ggml.model", _text(kind)),
        Pair(b"tokenizer.ggml.pre", _text("default")),
        Pair(b"tokenizer.ggml.tokens", _array(8, [_string(each) for each in tokens])),
        Pair(b"tokenizer.ggml.token_type", _array(5, [struct.pack("<i", each) for each in kinds])),
        Pair(b"tokenizer.ggml.scores", _array(6, [struct.pack("<f", -each) for each in range(n_vocab)])),
        Pair(b"tokenizer.ggml.merges", _array(8, [_string("a b"), _string("ab c")])),
        Pair(b"tokenizer.ggml.eos_token_id", struct.pack("<II", 4, ends)),
        Pair(b"tokenizer.ggml.bos_token_id", struct.pack("<II", 4, max(0, ends - 1))),
    ]


def _string(text: str) -> bytes:
    data = text.encode()
    return struct.pack("<Q", len(data)) + data


def _text(text: str) -> bytes:
    return struct.pack("<I", 8) + _string(text)


def _array(kind: int, values: list[bytes]) -> bytes:
    return struct.pack("<IIQ", 9, kind, len(values)) + b"".join(values)


class Loads:
    """Loads all cases one after another in one session."""

    def __init__(self) -> None:
        self._ended = threading.Condition()
        self._endings: list[AnyEvent] = []
        self.session = ModelSession(self._take)
        self._host = host_device()

    def _take(self, news: SessionUpdate) -> None:
        if isinstance(news, AnyEvent) and not isinstance(news, Progress | Reading | Token | Attempt | Fallback):
            with self._ended:
                self._endings.append(news)
                self._ended.notify_all()

    def _next(self) -> AnyEvent | None:
        with self._ended:
            self._ended.wait_for(lambda: self._endings, LIMIT_S)
            return self._endings.pop(0) if self._endings else None

    def play(self, path: Path) -> list[dict[str, Any]]:
        """Read, load and ask a model file.

        Return for each step how it ended, its seconds, and whether its message names the file.
        """
        steps: list[dict[str, Any]] = []
        begun_s = time.monotonic()

        def note(step: str, end: str, text: str) -> None:
            nonlocal begun_s
            named = path.name in text
            seconds = round(time.monotonic() - begun_s, 2)
            steps.append({"step": step, "end": end, "s": seconds, "named": named, "text": text[:300]})
            begun_s = time.monotonic()

        try:
            model = read_model(path)
            plan = Plan(ModelMemory(model), Rig((), self._host), Edit(single_device(model.n_layers, CPU_ID), CONTEXT))
            note("read", "ok", "")
            self.session.load(LoadSpec(plan))
        except EngineError as error:
            note("read", error.kind, error.summary())
            return steps
        for step in ("load", "chat", "raw"):
            if step != "load":
                self.session.ask(PROMPTS[step == "raw"])
            event = self._next()
            note(step, "none" if event is None else type(event).__name__, str(getattr(event, "message", "")))
            if event is None or isinstance(event, Crashed) or (step == "load" and not isinstance(event, Loaded)):
                break
        self.session.unload()
        return steps

    def close(self) -> None:
        self.session.close()


def faults(line: dict[str, Any]) -> list[str]:
    """Return a sentence for each missed goal of a case."""
    found = []
    for step in line["steps"]:
        if step["end"] == "none":
            found.append(f"{step['step']} did not end")
        elif step["s"] > STALL_S:
            found.append(f"{step['step']} took {step['s']} s")
        if step["end"] == "Crashed" and not step["named"]:
            found.append(f"{step['step']} does not name the file: {step['text']}")
    return found


def main() -> int:
    """Read the command line and run the cases."""
    parser = argparse.ArgumentParser(prog="mutated_loads", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--cases", type=int, default=5000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", type=int, help="play this case alone, and keep its file")
    given = parser.parse_args()
    cases, loads = Cases(), Loads()
    with tempfile.TemporaryDirectory(prefix="layerdeck-mutated-") as folder:
        if given.only is not None:
            path, name = cases.write(Path.cwd(), given.only)
            print(json.dumps({"header": name, "steps": loads.play(path)}, indent=1))
            loads.close()
            return 0
        done = [json.loads(line) for line in given.out.read_text().splitlines()] if given.out.exists() else []
        with given.out.open("a") as out:
            for number in range(len(done), given.cases):
                seed = given.seed * 1_000_000 + number
                path, name = cases.write(Path(folder), seed)
                line: dict[str, Any] = {"seed": seed, "header": name, "file": path.name, "steps": loads.play(path)}
                path.unlink()
                if any(step["end"] == "none" for step in line["steps"]):
                    loads.close()
                    loads = Loads()
                line["faults"] = faults(line)
                done.append(line)
                out.write(json.dumps(line) + "\n")
                out.flush()
    loads.close()
    ends = Counter(f"{line['steps'][-1]['step']} {line['steps'][-1]['end']}" for line in done)
    bad = [line for line in done if line["faults"]]
    slowest_s = max((step["s"] for line in done for step in line["steps"]), default=0)
    print(json.dumps({"cases": len(done), "bad": len(bad), "slowest_s": slowest_s, "ends": dict(ends)}))
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())

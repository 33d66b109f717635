"""Share of the demo model's answers that end in endless repetition, by sampling settings.

    python -m benchmarks.repetition [--seeds 5] [--tokens 400] [--model FILE.gguf] [--only NAME ...]

Each question is asked with each seed, four requests at a time. An answer counts if the child stops it for endless
repetition. Each row of the result is one group of sampler settings: greedy, those of the model's authors, and these
with penalties. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from itertools import product
from pathlib import Path

import msgspec

from benchmarks._children import OurChild, load_request, our_child
from engine.model.demo.speaking import SAMPLE_PROMPTS
from engine.planning.settings.sampling_settings import SamplingSettings
from engine.runtime.protocol.messages import Failure, Generated, Hello, LoadedModel, Piece, StageProgress
from engine.runtime.protocol.requests import ChatMessage, Generate

KEPT_MODEL = Path.home() / ".cache/layerdeck/models/SmolLM2-135M-Instruct.Q4_1.gguf"
QUESTIONS = (
    *SAMPLE_PROMPTS,
    "Tell a long story about a tree.",
    "Write a long poem about the sea.",
    "Tell a long story about a lighthouse keeper, a storm and a ship that nobody expected.",
    "List twenty animals with a sentence on each.",
)
AUTHORS = {"temperature": 0.2, "top_p": 0.9}
"""Sampler settings of the example in the model card."""
SETTINGS: Mapping[str, Mapping[str, float | int]] = {
    "greedy": {"temperature": 0.0},
    "authors": AUTHORS,
    "authors, penalty 1.05": {**AUTHORS, "repeat_penalty": 1.05, "penalty_last_n": 256},
    "authors, penalty 1.1": {**AUTHORS, "repeat_penalty": 1.1, "penalty_last_n": 256},
    "authors, DRY": {**AUTHORS, "dry_multiplier": 0.8, "dry_penalty_last_n": -1},
    "authors, DRY and penalty 1.05": {
        **AUTHORS,
        "dry_multiplier": 0.8,
        "dry_penalty_last_n": -1,
        "repeat_penalty": 1.05,
        "penalty_last_n": 256,
    },
}
TOGETHER = 4


def main() -> None:
    """Ask, count repetitions and print their shares."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=400)
    parser.add_argument("--model", type=Path, default=KEPT_MODEL)
    parser.add_argument("--only", nargs="+", default=(), choices=SETTINGS)
    parser.add_argument("--show", action="store_true", help="print the ends of the answers")
    options = parser.parse_args()
    result: dict[str, object] = {"benchmark": "repetition", "answers_each": options.seeds * len(QUESTIONS)}
    with our_child() as child:
        child.send(load_request(options.model, load_mode="mmap", n_ctx=TOGETHER * 1024, threads=1, n_seq_max=TOGETHER))
        while not isinstance(message := child.message(), LoadedModel):
            if not isinstance(message, Hello | StageProgress):
                raise RuntimeError(f"no load: {message}")
        for name, values in SETTINGS.items():
            if options.only and name not in options.only:
                continue
            reasons, texts = answers(child, values, options.seeds, options.tokens)
            share = reasons.count("repetition") / len(reasons)
            print(f"{name}: {share:.0%} of {len(reasons)} answers repeat themselves without end", flush=True)
            if options.show:
                print(
                    *(f"    {reason}: ...{text[-160:]!r}" for reason, text in zip(reasons, texts, strict=True)),
                    sep="\n",
                )
            result[name] = round(share, 3)
    print(json.dumps(result))


def answers(child: OurChild, values: Mapping[str, float | int], seeds: int, tokens: int) -> tuple[list[str], list[str]]:
    """Ask all questions with all seeds; return (stop reasons, texts) of the answers."""
    settings = SamplingSettings(max_tokens=tokens, **values)  # type: ignore[arg-type]
    asked = list(product(QUESTIONS, range(seeds)))
    child.send(
        *(
            Generate(
                id=number,
                messages=(ChatMessage(role="user", content=question),),
                sampling=msgspec.structs.replace(settings, seed=seed),
            )
            for number, (question, seed) in enumerate(asked, 1)
        )
    )
    reasons, texts = [""] * len(asked), [""] * len(asked)
    while not all(reasons):
        match child.message():
            case Generated() as message:
                reasons[message.request - 1] = message.stop_reason
            case Piece() as message:
                texts[message.request - 1] += message.text
            case Failure() as message:
                raise RuntimeError(f"no answer: {message}")
    return reasons, texts


if __name__ == "__main__":
    main()

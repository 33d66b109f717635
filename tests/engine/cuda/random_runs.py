"""What the programs that make random loads have in common: models, cards, plans, options and records.

A case depends only on its seed: `--first N --number 1` repeats one. Seeds that OUT.jsonl has are not repeated.
"""

from __future__ import annotations

import argparse
import gzip
import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from engine.base.errors import EngineError
from engine.devices.device import Rig
from engine.model.gguf.model_file import ModelFile
from engine.model.gguf.reader import read_model
from engine.planning.layout.layout_file import parse_layout
from engine.planning.memory.model_memory import ModelMemory
from engine.planning.plan.edit import Edit
from engine.planning.plan.plan import Plan
from tests.engine.cuda.cards import build
from tests.support.headers import write_with_hole
from tests.zoo.pack import read_document

CARDS = "RTX 3090=8.6=24576, RTX 3090=8.6=24576, RTX 5070=12.0=12288, RTX 5080=12.0=16384"
HEADERS = Path(__file__).parents[2] / "zoo" / "headers"
SUFFIX = ".gguf.head.gz"
MAX_SMALL_BYTES = 256 << 20
"""Largest size of a small model of the zoo. The well-known ones are larger."""


def model_names(*, small: bool) -> list[str]:
    """Return the names of the small models of the zoo, or else of the well-known ones."""
    names = [head.name.removesuffix(SUFFIX) for head in sorted(HEADERS.glob(f"*{SUFFIX}"))]
    return [name for name in names if (read_document(name)["size_bytes"] <= MAX_SMALL_BYTES) == small]


def read_header(name: str) -> bytes:
    """Return the header of a model of the zoo."""
    return gzip.decompress((HEADERS / f"{name}{SUFFIX}").read_bytes())


def write_models(folder: Path, *, small: bool, only: str = "") -> dict[str, ModelFile]:
    """Write the small models of the zoo into `folder`, or else the well-known ones, with a hole in place of weights.

    Return them by name. `only`: part of their names.
    """
    return {
        name: read_model(write_with_hole(folder / f"{name}.gguf", read_header(name), read_document(name)["size_bytes"]))
        for name in model_names(small=small)
        if only in name
    }


def plan_of(
    document: Mapping[str, Any], model: ModelFile, rig: Rig, *, any_model: bool = False
) -> Plan | dict[str, Any]:
    """Return the plan of a layout document; if it is refused, the fields `outcome` and `what` of its record.

    `any_model`: also plan models that only a probe can forecast.
    """
    try:
        file = parse_layout(json.dumps(document), n_layers=model.n_layers)
        plan = Plan(ModelMemory(model), rig, Edit(file.layout, file.context))
        if plan.violations:
            return {"outcome": "rule", "what": [each.rule for each in plan.violations]}
        if plan.report.probe_only and not any_model:
            return {"outcome": "unknown", "what": plan.report.probe_only}
    except EngineError as error:
        return {"outcome": "refused", "what": error.summary()}
    return plan


def limit_expert_ids(model: ModelFile) -> None:
    """Tell the stand-in cards how many experts there are: they make up ids, which the engine reads back and checks."""
    experts = model.hyper_parameter("expert_count")
    os.environ["STAND_IN_EXPERTS"] = str(experts if isinstance(experts, int) and experts else 1)


def new_parser(module: str, number: int) -> argparse.ArgumentParser:
    """Return a parser with the options of all programs. `number`: the default number of seeds."""
    parser = argparse.ArgumentParser(prog=f"python -m {module}")
    parser.add_argument("out", type=Path, help="records are appended as lines of JSON")
    parser.add_argument("--number", type=int, default=number, help="seeds; rules refuse some of their layouts")
    parser.add_argument("--first", type=int, default=1, help="the first seed")
    parser.add_argument("--only", default="", help="part of the names of models")
    parser.add_argument("--summary", action="store_true", help="load nothing")
    return parser


def run_with_cards(module: str, arguments: Sequence[str] | None, **environ: str) -> int | None:
    """Run the program `module` again with the stand-in cards, and return its exit code; None if they are here.

    The loader reads its path at the start of a process only, and NVML is asked in the program's own process.
    `environ`: variables over those of `CARDS`.
    """
    if "STAND_IN_CARDS" in os.environ:
        return None
    with TemporaryDirectory() as name:
        build(Path(name))
        paths = filter(None, [name, os.environ.get("LD_LIBRARY_PATH")])
        cards = {"STAND_IN_CARDS": CARDS, "STAND_IN_CONTEXT": "450", "STAND_IN_EMPTY": "1"}
        environment = {**os.environ, "LD_LIBRARY_PATH": os.pathsep.join(paths), **cards, **environ}
        again = [sys.executable, "-m", module, *(sys.argv[1:] if arguments is None else arguments)]
        return subprocess.run(again, env=environment, check=False).returncode


def append_records(options: argparse.Namespace, run: Callable[[int], dict[str, Any]]) -> list[dict[str, Any]]:
    """Call `run` with each seed of the options that has no record yet; return all records, which the file then has."""
    records = read_records(options.out)
    done = {record["seed"] for record in records}
    with options.out.open("a", encoding="utf-8") as out:
        for seed in range(options.first, options.first + options.number):
            if seed not in done:
                records.append(run(seed))
                out.write(json.dumps(records[-1]) + "\n")
                out.flush()
    return records


def read_records(path: Path) -> list[dict[str, Any]]:
    """Return the records of earlier runs."""
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def command_line(*words: str) -> str:
    """Return what the command line prints as JSON."""
    command = [sys.executable, "-c", "import sys; from app.cli import main; sys.exit(main())", *words, "--json"]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=120).stdout

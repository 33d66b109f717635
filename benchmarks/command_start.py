"""Time of `layerdeck-cli --help` and `inspect` from start to end, as ratios to a bare Python interpreter.

Each start is a new process; the three kinds are measured in turns, in 15 rounds. Printed are median milliseconds of the
wall clock, and the ratios of `--help` and of `inspect` (of a small file) to `python -c pass`. The last line is one JSON
object.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from benchmarks._turns import medians_in_turns
from engine.model.demo.writer import write_demo_model

ROUNDS = 15
ROOT = Path(__file__).resolve().parent.parent
CLI = "import sys; from app.cli import main; sys.exit(main())"


def main() -> None:
    """Measure and print."""
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder, "demo.gguf")
        write_demo_model(model)
        commands = {"bare": ["pass"], "help": [CLI, "--help"], "inspect": [CLI, "inspect", str(model)]}
        medians = medians_in_turns(commands, lambda kind: start_once(commands[kind]), ROUNDS)
    result = {
        "benchmark": "command_start",
        **{f"{kind}_ms": round(seconds * 1000, 1) for kind, seconds in medians.items()},
        "help_ratio": round(medians["help"] / medians["bare"], 2),
        "inspect_ratio": round(medians["inspect"] / medians["bare"], 2),
        "rounds": ROUNDS,
    }
    print(f"bare {result['bare_ms']} ms, --help {result['help_ratio']} times that, inspect {result['inspect_ratio']}")
    print(json.dumps(result))


def start_once(words: list[str]) -> float:
    """Run the interpreter with a program and its arguments; return the seconds from start to end."""
    begun = time.perf_counter()
    subprocess.run([sys.executable, "-c", *words], cwd=ROOT, stdout=subprocess.DEVNULL, check=True)
    return time.perf_counter() - begun


if __name__ == "__main__":
    main()

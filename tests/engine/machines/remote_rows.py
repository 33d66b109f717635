"""Forecasts compared to the byte with the engine's report, in random loads on lent devices.

    python -m tests.engine.machines.remote_rows OUT.jsonl cuda|vulkan [--number 500] [--local] [--summary]

A listener in this process lends devices through the tunnel: simulated CUDA cards (`tests/engine/cuda/cards.c`) or
Mesa's llvmpipe, and the CPU. Layouts are random over them and the local CPU; with `--local` also over the same cards
without the tunnel. Models, records and summary are those of `tests.engine.cuda.random_rows`. The engine with the
backend must be importable (`PYTHONPATH`), as for the tests of that backend.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

from engine.devices.device import Rig
from engine.machines.rigs.discovery import discover, host_device
from engine.machines.rigs.secure_serving import Lending
from tests.engine.cuda.random_rows import one_load, summary
from tests.engine.cuda.random_runs import append_records, new_parser, read_records, run_with_cards, write_models
from tests.support.lending import Served, reached

MODULE = "tests.engine.machines.remote_rows"
LISTING_S = 600.0
"""llvmpipe compiles shaders when its devices are first listed."""
ENVIRONMENT = {"vulkan": {"GGML_VK_VISIBLE_DEVICES": "0,0,0"}}


@contextmanager
def lent_rig(folder: Path, *, local: bool = False) -> Iterator[Rig]:
    """Yield this machine with its devices lent to itself. `local`: also with the same devices as its own."""
    found = discover(timeout_s=LISTING_S)
    lendings = [Lending(device) for device in (*found.devices, host_device())]
    with Served(folder / "attic", lendings) as served, reached(served, folder / "laptop") as rig:
        yield Rig((*(found.devices if local else ()), *rig.devices), rig.host)


def main(arguments: Sequence[str] | None = None) -> int:
    """Make the loads, write a record of each, and print a summary; 1 if anything differs."""
    parser = new_parser(MODULE, 500)
    parser.add_argument("backend", choices=("cuda", "vulkan"))
    parser.add_argument("--local", action="store_true", help="layouts also use the devices without the tunnel")
    options = parser.parse_args(arguments)
    if options.summary:
        print(summary(read_records(options.out)))
        return 0
    if options.backend == "cuda" and (code := run_with_cards(MODULE, arguments)) is not None:
        return code
    os.environ.update(ENVIRONMENT.get(options.backend, {}))
    with TemporaryDirectory() as name:
        folder = Path(name)
        models = write_models(folder, small=True, only=options.only)
        with lent_rig(folder, local=options.local) as rig:
            records = append_records(options, lambda seed: one_load(seed, models, rig, known=False, warm_up=False))
    print(summary(records))
    return 1 if any(record["outcome"] == "off" for record in records) else 0


if __name__ == "__main__":
    raise SystemExit(main())

"""Records a model for the zoo: `python -m tests.zoo.add MODEL.gguf... [--source LLAMA_CPP]`.

Each MODEL is loaded by the installed engine on stand-in devices of every kind, with all cases of `record.py`, and what
it takes is written to `headers/` and `truth/`. A small model with weights is loaded for real, too.

LLAMA_CPP is the folder of the engine's llama.cpp source, for devices that answer like CUDA ones (`simdev.c`, needs a C
compiler). Without it only RPC workers are asked.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

from tests.zoo import pack, record
from tests.zoo.follow import build_stand_ins

SMALL_BYTES = 256 << 20
"""Largest file that is loaded for real."""
TINY_CONTEXT = 256
"""Trained context length of the models that llama.cpp's test-llama-archs writes; the usual cases need a longer one."""


def add(model: Path, engines: Sequence[record.Engine], folder: Path) -> None:
    """Record one model with each engine, and pack the results. `folder`: for files in between."""
    pack.pack_model(model)
    facts = record.describe(model)
    for number, (engine, layouts) in enumerate((engine, layouts) for engine in engines for layouts in (False, True)):
        out = folder / str(number)
        record.run(
            [model],
            out,
            real=model.stat().st_size <= SMALL_BYTES,
            tiny=facts["context_length"] <= TINY_CONTEXT,
            real_only=False,
            wanted=None,
            engine=engine,
            layouts=layouts,
            like=None,
        )
        pack.pack_truth(out / f"{model.stem}.json")


def main(arguments: Sequence[str] | None = None) -> None:
    """Command line entry point."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("models", nargs="+", type=Path)
    parser.add_argument("--source", type=Path, help="the engine's llama.cpp source; without it only RPC workers")
    options = parser.parse_args(arguments)
    python = Path(sys.executable)
    with TemporaryDirectory() as name:
        folder = Path(name)
        engines = [record.Engine(python)]
        if options.source:
            engines.append(record.Engine(python, *build_stand_ins(options.source, folder)))
        for model in options.models:
            add(model, engines, folder / model.stem)


if __name__ == "__main__":
    main()

"""`python -m resources.packs.build NAME --source GGML --engine VERSION --out FOLDER`: builds one backend as a pack.

`GGML` is the folder vendor/llama.cpp/ggml in the sources of llama-cpp-python, of the engine's version. `make.py pack`
finds it and calls this module. On a machine without a network the folder can be copied and this module called directly.
Needs cmake, a C++ compiler, optionally ninja, and what `needs.find_settings_error` names.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path

from resources.packs.archive import write_pack
from resources.packs.cuda_parts import missing_parts
from resources.packs.needs import compiler_flags, find_nvcc, find_settings_error
from resources.packs.recipes import RECIPES, Recipe, configure_options
from resources.setup.machine import find_compiler

PROJECT = Path(__file__).resolve().parent
Run = Callable[[Sequence[str], Mapping[str, str]], None]
"""Runs a build command with environment variables. Raises an exception if the command fails."""


def build_pack(
    recipe: Recipe,
    source: Path,
    engine: str,
    out: Path,
    scratch: Path,
    run: Run,
    *,
    architectures: str = "",
    sign: Callable[[bytes], bytes] = bytes,
) -> Path:
    """Build the pack in the folder `scratch`, write the archive into `out`, and return its path.

    `engine`: version of llama-cpp-python whose sources are in `source`.
    `architectures`: cards to build for, as in CMake's variable; empty: ggml's default.
    `sign`: receives the manifest (JSON) and returns the signed one.
    """
    environ = dict(os.environ)
    nvcc = find_nvcc(environ) if recipe.name == "cuda" else None
    if nvcc is not None:
        environ["CUDACXX"] = nvcc
    cmake = shutil.which("cmake", path=environ.get("PATH")) or "cmake"
    generator = ["-G", "Ninja"] if shutil.which("ninja", path=environ.get("PATH")) else []
    options = configure_options(recipe, architectures, compiler_flags(recipe.name, environ))
    options = (f"-DGGML_SOURCE={source.resolve()}", *options)
    if nvcc is not None:
        options += tuple(missing_parts(nvcc, scratch, find_compiler("CC") or "cc"))
    run([cmake, "-S", str(PROJECT), "-B", str(scratch), *generator, *options], environ)
    jobs = str(os.cpu_count() or 1)
    run([cmake, "--build", str(scratch), "--target", recipe.target, "--parallel", jobs], environ)
    library = next(scratch.rglob(recipe.library))
    if strip := shutil.which("strip"):
        run([strip, "--strip-unneeded", str(library)], environ)
    return write_pack(recipe, [library], engine, out, sign)


def main(arguments: Sequence[str] | None = None) -> int:
    """Build one pack; return the exit code."""
    parser = argparse.ArgumentParser(prog="resources.packs.build")
    parser.add_argument("name", choices=RECIPES)
    parser.add_argument("--source", type=Path, required=True)
    parser.add_argument("--engine", required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--architectures", default="", help='CMake\'s, as "75;86;90"; without, most that are in use')
    parser.add_argument("--scratch", type=Path, help="build here and keep it: the same call goes on where it ended")
    options = parser.parse_args(arguments)
    if fault := find_settings_error(options.name, os.environ):
        sys.stderr.write(f"{fault}\n")
        return 2

    def run(command: Sequence[str], environ: Mapping[str, str]) -> None:
        subprocess.run(command, env=environ, check=True)

    with ExitStack() as stack:
        scratch = options.scratch or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="layerdeck-pack-")))
        recipe, architectures = RECIPES[options.name], options.architectures
        archive = build_pack(
            recipe, options.source, options.engine, options.out, scratch, run, architectures=architectures
        )
    sys.stdout.write(f"{archive}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())

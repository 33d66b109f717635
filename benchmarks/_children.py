"""Child processes for benchmarks: our model child behind its pipes, children that call llama.cpp alone, and a model."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import gguf
import msgspec
import numpy as np

from engine.model.demo.llama_writer import LlamaShape, byte_vocabulary, write_llama
from engine.planning.layout.engine_parameters import MAX_DEVICES, EngineParameters
from engine.planning.settings.context_settings import ContextSettings
from engine.runtime.protocol.messages import AnyMessage
from engine.runtime.protocol.requests import AnyRequest, Load

ROOT = Path(__file__).resolve().parent.parent
TIMEOUT_S = 300
LOAD_MODES = {"none": 0, "mmap": 1}


class OurChild:
    """A model child of ours, driven through its pipes without a session.

    `begun`: `time.perf_counter()` at its start.
    """

    def __init__(self) -> None:
        self.begun = time.perf_counter()
        self._process = subprocess.Popen(
            [sys.executable, "-m", "engine.runtime.child"],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )
        self._decoder: msgspec.json.Decoder[AnyMessage] = msgspec.json.Decoder(AnyMessage)

    @property
    def pid(self) -> int:
        return self._process.pid

    def send(self, *requests: AnyRequest) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(b"".join(msgspec.json.encode(request) + b"\n" for request in requests))
        self._process.stdin.flush()

    def message(self) -> AnyMessage:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError("the worker ended")
        return self._decoder.decode(line)

    def close(self) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.stdout.close()
        self._process.wait(TIMEOUT_S)


@contextmanager
def our_child() -> Iterator[OurChild]:
    """Yield a model child; it is ended at the end of the context."""
    child = OurChild()
    try:
        yield child
    finally:
        child.close()


class BareLoop:
    """A child that generates with llama.cpp alone (`_bare_loop.py`)."""

    def __init__(self, path: Path, *, n_ctx: int, threads: int, sequences: int) -> None:
        arguments = [str(path), str(n_ctx), str(threads), str(sequences)]
        self._process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks._bare_loop", *arguments],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        self._answer()

    def ask(self, request: list[str | int]) -> dict[str, Any]:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        return self._answer()

    def close(self) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.stdout.close()
        self._process.wait(TIMEOUT_S)

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError("the bare child ended")
        figures: dict[str, Any] = json.loads(line)
        return figures


@contextmanager
def bare_loop(path: Path, *, n_ctx: int, threads: int, sequences: int) -> Iterator[BareLoop]:
    """Yield a child that generates with llama.cpp alone; it is ended at the end of the context."""
    loop = BareLoop(path, n_ctx=n_ctx, threads=threads, sequences=sequences)
    try:
        yield loop
    finally:
        loop.close()


def load_request(path: Path, *, load_mode: str, n_ctx: int, threads: int, n_seq_max: int = 1) -> Load:
    """Return the request to load a model with all layers on the CPU."""
    return Load(
        path=str(path),
        devices=(),
        parameters=EngineParameters(n_gpu_layers=0, devices=(), tensor_split=(0.0,) * MAX_DEVICES, split_mode="layer"),
        context=ContextSettings(
            n_ctx=n_ctx,
            n_seq_max=n_seq_max,
            threads=threads,
            load_mode=load_mode,  # type: ignore[arg-type]
        ),
    )


def run_bare(what: str, path: Path, *, load_mode: str, n_ctx: int, threads: int) -> tuple[float, dict[str, Any]]:
    """Run `_bare_llama.py`; return the wall-clock seconds from its start to its output, and the output.

    `what`: "load" or "probe".
    """
    arguments = [what, str(path), str(LOAD_MODES[load_mode]), str(n_ctx), str(threads)]
    begun = time.perf_counter()
    child = subprocess.Popen(
        [sys.executable, "-m", "benchmarks._bare_llama", *arguments],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    )
    assert child.stdout is not None
    line = child.stdout.readline()
    seconds = time.perf_counter() - begun
    child.stdout.close()
    if child.wait(TIMEOUT_S) != 0:
        raise RuntimeError("the bare child failed")
    return seconds, json.loads(line)


def write_model(path: Path, *, n_layers: int, n_embd: int, n_ff: int) -> Path:
    """Write a dense F16 model with random weights."""
    generator = np.random.default_rng(1)

    def weights(name: str, extents: tuple[int, ...]) -> Any:
        if len(extents) == 1:
            return np.ones(extents, np.float32)
        return generator.standard_normal(extents, np.float32) / np.float32(extents[-1] ** 0.5)

    shape = LlamaShape(n_layers, n_embd, n_embd // 64, n_embd // 64, n_ff, 4096)
    write_llama(
        path, shape, byte_vocabulary(8192), name=path.stem, weights=weights,
        matrix_type=gguf.GGMLQuantizationType.F16,
    )  # fmt: skip
    return path


def usable_processors() -> int:
    """Return how many processors this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1

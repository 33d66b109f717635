"""Tests whether a layout may use one device several times, as several entries of llama.cpp's device list.

The logits of every prompt must be the same as with a single entry.

Two entries of one card are two instances of its backend with their own streams, and the engine does not synchronise
them everywhere. Whether that matters depends on the backend and the engine's version, so it is tested once for each:
a small model is loaded on the device as one entry, then as interleaved entries, with prompts that fill the pipeline.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec
from msgspec import Struct

from engine.base.cancellation import CancelToken
from engine.base.engine_build import engine_version
from engine.base.errors import DocumentError, EngineError
from engine.base.json_file import read_struct, write_file
from engine.base.language import tr
from engine.base.values import replace
from engine.devices.device import Device, Rig
from engine.model.gguf.reader import read_model
from engine.planning.layout.engine_parameters import MAX_DEVICES, MAX_ENTRIES, EngineParameters
from engine.planning.settings.context_settings import ContextSettings
from engine.runtime.plan_requests import device_refs, environment_for
from engine.runtime.process.blocking_child import BlockingChild
from engine.runtime.protocol.messages import AllocationFailure, LoadReply, LogitDigest
from engine.runtime.protocol.requests import Load, Logits

ROUNDS = 20
MAX_ENTRIES_TRIED = 5
MAX_FILE_BYTES = 1 << 16
_VERSION = 1
CONTEXT = ContextSettings(n_ctx=512, n_batch=256, n_ubatch=32, pipeline="on")
"""Context settings of the test: eight micro batches for each prompt.

With pipeline parallelism several of them are computed at the same time.
"""
LOAD_TIMEOUT_S = 120.0


class SelfTest(Struct, frozen=True):
    """The result of the test whether a layout may use a device several times.

    `rounds`: number of prompts.
    `different`: number of prompts whose logits differed from those of a layout that uses the device once.
    """

    rounds: int
    different: int

    @property
    def passed(self) -> bool:
        return self.rounds > 0 and self.different == 0


def try_repeated(
    rig: Rig,
    device_id: str,
    model: Path,
    *,
    rounds: int = ROUNDS,
    cancel: CancelToken | None = None,
) -> SelfTest:
    """Compare the logits of `model` with the device once and several times in llama.cpp's device list.

    Blocks for seconds. `rounds`: number of prompts that are compared.

    Raises:
        EngineError: if the model cannot be loaded on the device, if the child failed, or if `cancel` was cancelled.
    """
    # The output layer is a position too.
    positions = read_model(model).n_layers + 1
    prompts = [_prompt(number) for number in range(rounds)]
    with BlockingChild(
        timeout_s=LOAD_TIMEOUT_S,
        cancel=cancel,
        name="self-test",
        environment=environment_for(rig, (device_id,)),
    ) as child:

        def digests(runs: Sequence[int]) -> list[str]:
            answer = child.ask(_load(rig, device_id, model, runs), LoadReply)
            if isinstance(answer, AllocationFailure):
                raise EngineError(
                    tr(
                        "{device_id} has too little free memory for the self-test: {text}. Unload models or close "
                        "other programs, then try again.",
                        device_id=device_id,
                        text=answer.text,
                    )
                )
            return [child.ask(Logits(tokens=prompt), LogitDigest).sha256 for prompt in prompts]

        expected = digests([positions])
        found = digests(_interleaved(positions))
    return SelfTest(rounds, sum(one != other for one, other in zip(expected, found, strict=True)))


def _load(rig: Rig, device_id: str, model: Path, runs: Sequence[int]) -> Load:
    # Whole layer counts that sum to `n_gpu_layers` make llama.cpp's float32 split exact.
    counts = [float(length) for length in runs]
    return Load(
        path=str(model),
        devices=device_refs(rig),
        parameters=EngineParameters(
            n_gpu_layers=sum(runs),
            devices=(device_id,) * len(runs),
            tensor_split=(*counts, *[0.0] * (MAX_DEVICES - len(counts))),
            split_mode="layer",
        ),
        context=CONTEXT,
    )


def _interleaved(positions: int) -> list[int]:
    """Divide `positions` layers evenly among entries of llama.cpp's device list; return each entry's number of layers.

    There are at most `MAX_ENTRIES_TRIED` entries. `positions` includes the output layer.
    """
    count = min(MAX_ENTRIES_TRIED, MAX_ENTRIES, positions)
    # Differences of a floor: they sum to `positions`, and differ by one at most.
    return [positions * (index + 1) // count - positions * index // count for index in range(count)]


def _prompt(number: int) -> tuple[int, ...]:
    """Return the token ids of the prompt for round `number`. Each round has a different prompt.

    Only ids below 200 are used, which every vocabulary has.
    """
    # Lengths differ as well, so that the last micro-batch is not always full.
    return tuple(3 + (number * 7 + index * (1 + number % 5)) % 197 for index in range(CONTEXT.n_batch - number))


# ------------------------------------------------------------------ what is kept


class _Document(Struct, frozen=True):
    version: int
    passed: dict[str, bool]


def verdict_key(device: Device) -> str:
    """Return the key under which the test result of a device is stored: its backend and the engine's version."""
    return f"{device.backend} {engine_version()}"


def read_verdicts(path: Path) -> dict[str, bool]:
    """Return the stored test results by `verdict_key`: whether a layout may use a device several times.

    Empty if the file is missing, damaged or of another version.
    """
    document = read_struct(path, _Document, MAX_FILE_BYTES, version=_VERSION)
    return {} if document is None else document.passed


def keep_verdict(path: Path, device: Device, result: SelfTest) -> None:
    """Store whether a layout may use `device` several times, as the result for all devices of its backend.

    Raises:
        DocumentError: if the file cannot be written.
    """
    engine = engine_version()
    # Verdicts on other versions of the engine are removed: another version may synchronise elsewhere.
    kept = {key: passed for key, passed in read_verdicts(path).items() if key.endswith(engine)}
    document = _Document(version=_VERSION, passed=kept | {verdict_key(device): result.passed})
    write_file(path, msgspec.json.encode(document), what="self-test", fail=DocumentError)


def with_verdicts(rig: Rig, verdicts: Mapping[str, bool]) -> Rig:
    """Return `rig` with `Capabilities.repeatable` (one layout may use the device several times) set from stored test
    results.

    `verdicts`: results by `verdict_key`. RPC workers and devices without a result are not changed.
    """

    def judged(device: Device) -> Device:
        passed = verdicts.get(verdict_key(device))
        if device.is_rpc or passed is None or passed == device.capabilities.repeatable:
            return device
        return replace(device, capabilities=replace(device.capabilities, repeatable=passed))

    return Rig(tuple(map(judged, rig.devices)), rig.host)

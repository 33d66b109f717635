"""The engine's self-check: tests whether a device computes each type of weights and cache correctly.

Small models are written in each type of weights. Each case decodes a few tokens in a child process of its own, so that
a crash ends only that case. The expected logits are computed by the CPU with plain weights, without repacked copies.
"""

from __future__ import annotations

import signal as signals
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from msgspec import Struct, field

from engine.base.cancellation import CancelToken
from engine.base.errors import EngineError, WorkerCrashedError, WorkerStalledError
from engine.base.values import replace
from engine.devices.device import CPU_ID, Device, Feature, Rig
from engine.planning.layout.engine_parameters import MAX_DEVICES, EngineParameters
from engine.planning.settings.context_settings import KV_TYPES, ContextSettings, KvType
from engine.runtime.plan_requests import device_refs, environment_for
from engine.runtime.process.blocking_child import BlockingChild, error_with_endpoints, raise_if_cancelled
from engine.runtime.protocol.messages import AllocationFailure, LoadReply, LogitDigest, Quantised
from engine.runtime.protocol.requests import Load, Logits, Quantise

WEIGHT_TYPES = {
    "F16": "F16", "BF16": "BF16", "Q4_0": "Q4_0", "Q4_1": "Q4_1", "Q5_0": "Q5_0", "Q5_1": "Q5_1", "Q8_0": "Q8_0",
    "Q2_K": "Q2_K", "Q3_K": "Q3_K_S", "Q4_K": "Q4_K_S", "Q5_K": "Q5_K_S", "Q6_K": "Q6_K", "IQ4_NL": "IQ4_NL",
    "IQ4_XS": "IQ4_XS",
}  # fmt: skip
"""Types of weights to check (keys), and the file types for llama.cpp's quantiser (values).

A model that is quantised to the file type has nearly all matrices in the type to check.
"""
N_LAYERS = 2
_SEED = 11


def write_source(path: Path) -> None:
    """Write a small F16 model of random weights to `path`.

    The row length of its matrices is a multiple of the block length of all types, and its head size suits all kernels.
    """
    import gguf
    import numpy as np

    from engine.model.demo.llama_writer import LlamaShape, Matrix, byte_vocabulary, write_llama

    generator = np.random.default_rng(_SEED)

    def weights(name: str, extents: tuple[int, ...]) -> Matrix:
        if len(extents) == 1:
            return np.ones(extents, np.float32)
        # Divided by the square root of the row length, so that activations keep their variance from layer to layer.
        return generator.standard_normal(extents, np.float32) / np.float32(extents[-1] ** 0.5)

    # 256 is the super-block of K-quants (QK_K in ggml), the longest block of all types.
    shape = LlamaShape(n_layers=N_LAYERS, n_embd=256, n_head=4, n_head_kv=2, n_ff=512, n_ctx_train=512)
    kind = gguf.GGMLQuantizationType.F16
    write_llama(path, shape, byte_vocabulary(), name="engine check", weights=weights, matrix_type=kind)


def write_models(folder: Path, cancel: CancelToken | None = None) -> dict[str, Path]:
    """Write a small model in each type of weights that the quantiser can write, and return the paths by type.

    Blocks for some seconds.

    Raises:
        EngineError: the work was cancelled (`cancel`).
    """
    source = folder / "source.gguf"
    write_source(source)
    models: dict[str, Path] = {}
    types = iter(WEIGHT_TYPES.items())
    while len(models) < len(WEIGHT_TYPES):
        # One child writes all types. If it dies at a type, another child continues with the next type.
        with BlockingChild(cancel=cancel, name="quantiser") as child:
            try:
                for weight_type, file_type in types:
                    target = folder / f"{weight_type}.gguf"
                    child.ask(Quantise(path=str(source), target=str(target), file_type=file_type), Quantised)
                    models[weight_type] = target
                break
            except EngineError:
                raise_if_cancelled(cancel)
    return models


CONTEXT = ContextSettings(n_ctx=256, n_batch=64, n_ubatch=64, threads=2, threads_batch=2, flash_attn="off")
PROMPTS = (tuple(range(3, 43)), (7,))
"""Prompts of a check: many tokens, which need matrix products, and one token, which needs matrix-vector products."""
TOLERANCE = 0.05
"""Largest error of the logits that is accepted.

The error is the mean squared difference divided by the variance of the expected logits. Rounding in other kernels
gives some thousandths, faults give 1 and more.
"""
WEIGHT_TOLERANCE = 0.9
"""Largest accepted error of the CPU's logits with quantised weights; F16 weights give the expected logits.

It is large because random weights are quantised badly: Q2_K has an error of 0.5.
"""
CACHE_TOLERANCE = 0.25
"""Largest accepted error of the CPU's logits with a quantised KV cache; an F16 cache gives the expected logits."""
FELL_SILENT = "It was not tested, because the worker no longer answered; restart the worker."
TIMEOUT_S = 120.0


class Trial(Struct, frozen=True):
    """A computation of logits: a model file, devices and settings.

    `context`: context settings of the load.
    `devices`: ids of the devices that share the model, empty for the CPU.
    `extra_buffers`: whether the CPU may use repacked weights.
    `tensor_split`: whether the devices share each layer (split mode tensor).
    """

    model: Path
    devices: tuple[str, ...] = ()
    context: ContextSettings = CONTEXT
    extra_buffers: bool = False
    tensor_split: bool = False

    @property
    def parameters(self) -> EngineParameters:
        """Parameters to load the model with all layers on the devices, or on the CPU if there are none."""
        # The output layer counts in `n_gpu_layers`.
        count = N_LAYERS + 1 if self.devices else 0
        # Split mode layer: a count equal to `n_gpu_layers` puts all layers on the first device.
        shares = [1.0] * len(self.devices) if self.tensor_split else [float(count)][: len(self.devices)]
        return EngineParameters(
            n_gpu_layers=count,
            devices=self.devices,
            tensor_split=(*shares, *[0.0] * (MAX_DEVICES - len(shares))),
            split_mode="tensor" if self.tensor_split else "layer",
            extra_buffers=self.extra_buffers,
        )


class Case(Struct, frozen=True):
    """One comparison of the engine's check: two loads of one model must compute nearly the same logits.

    `feature`: what is checked, such as weights or flash attention. `of`: type of weights or cache; empty if the feature
    has no types.
    `tried`, `expected`: the load that uses the feature, and the load that does without it.
    `devices`: ids of the devices that are checked.
    `tolerance`: largest error of the logits that is still accepted.
    """

    feature: Feature
    of: str
    devices: tuple[str, ...]
    tried: Trial
    expected: Trial
    tolerance: float = TOLERANCE

    @property
    def words(self) -> str:
        """What the case tests, as text for people, such as "Q4_0 weights" or "flash attention with a q8_0 cache"."""
        match self.feature:
            case "weights":
                return f"{self.of} weights"
            case "extra_buffers":
                return f"{self.of} weights repacked for the CPU"
            case "flash_attention":
                return f"flash attention with a {self.of} cache"
            case "tensor_split":
                return "split mode tensor"
            case "repeated":
                return "a device used twice"


class Checked(Struct, frozen=True):
    """The result of a case of the self-check.

    `reason`: a sentence if the case failed.
    `difference`: error of the logits; None if nothing could be compared.
    `seconds`: duration of the case.
    `is_known`: whether the feature was really tried; it was not if memory ran out or the child was silent.
    `is_stalled`: whether the child was silent for too long, perhaps because the machine was busy.
    """

    case: Case
    ok: bool
    reason: str = ""
    difference: float | None = None
    seconds: float = 0.0
    is_known: bool = True
    is_stalled: bool = False


def cases_of(device: Device, models: dict[str, Path]) -> Iterator[Case]:
    """Yield the cases that check a single device: types of weights and of caches.

    `models`: paths of the models by type of weights.
    """
    host, own = device.is_host, (() if device.is_host else (device.id,))
    for weight_type, path in models.items():
        plain = Trial(path)
        if not host:
            yield Case("weights", weight_type, own, Trial(path, own), plain)
            continue
        # The CPU is the reference for other devices; its own types of few bits have only F16 to be compared with.
        usual = Trial(models.get("F16", path))
        yield Case("weights", weight_type, (CPU_ID,), plain, usual, WEIGHT_TOLERANCE)
        yield Case("extra_buffers", weight_type, (CPU_ID,), Trial(path, extra_buffers=True), plain)
    source = models.get("F16")
    if source is None:
        return
    for cache_type in KV_TYPES:
        # The CPU is compared with an F16 cache and no flash attention, others with the CPU at the same cache type.
        expected = Trial(source) if host else Trial(source, context=_with_flash(cache_type))
        tolerance = CACHE_TOLERANCE if host else TOLERANCE
        tried = Trial(source, own, _with_flash(cache_type))
        yield Case("flash_attention", cache_type, own or (CPU_ID,), tried, expected, tolerance)


def shared_cases(rig: Rig, models: dict[str, Path]) -> Iterator[Case]:
    """Yield the cases that check several devices together: a tensor split over devices of one backend.

    `models`: paths of the models by type of weights.
    """
    path = models.get("F16")
    if path is None:
        return
    alike: dict[str, list[str]] = {}
    for device in rig.devices:
        # A device whose tensor split failed in an earlier check is checked again.
        can_split = device.capabilities.tensor_split or device.fault("tensor_split") is not None
        if can_split and device.kind != "accel":
            alike.setdefault(device.backend, []).append(device.id)
    for members in alike.values():
        if 1 < len(members) <= MAX_DEVICES:
            context = _with_flash("f16")
            yield Case(
                "tensor_split", "", tuple(members), Trial(path, tuple(members), context, tensor_split=True), Trial(path)
            )


def _with_flash(cache_type: KvType) -> ContextSettings:
    return replace(CONTEXT, flash_attn="on", type_k=cache_type, type_v=cache_type)


class Checker(Struct):
    """Runs cases of the self-check, each in a child process. Expected logits are computed once for all cases.

    `rig`: devices that the cases use.
    `argv`: command of the child, None for the default one.
    `environment`: additional environment variables of the child.
    """

    rig: Rig
    argv: Sequence[str] | None = None
    cancel: CancelToken | None = None
    environment: Mapping[str, str] | None = None
    silent: set[str] = field(default_factory=set)
    """Endpoints of RPC workers that stopped answering. Their further cases are skipped."""
    _computed: dict[Trial, tuple[float, ...]] = field(default_factory=dict)

    def run(
        self, cases: Iterable[Case], on_checked: Callable[[Checked], None] = lambda _checked: None
    ) -> list[Checked]:
        """Run the cases, and return their results in order; `on_checked` is called with each result.

        Raises:
            EngineError: the check was cancelled (`cancel`).
        """
        found = []
        for case in cases:
            raise_if_cancelled(self.cancel)
            checked = self._check(case)
            on_checked(checked)
            found.append(checked)
        return found

    def _check(self, case: Case) -> Checked:
        begun_s = time.monotonic()
        # A stall costs the whole time-out, so a worker that has fallen silent is not tried again.
        endpoints = {device.endpoint for device in self.rig.devices if device.id in case.devices and device.endpoint}
        if endpoints & self.silent:
            return Checked(case, ok=False, reason=FELL_SILENT, is_known=False)
        try:
            # The reference first: without it the device's logits would be compared with nothing.
            expected = self._compute_once(case.expected)
        except EngineError as error:
            raise_if_cancelled(self.cancel)
            reason = f"There is nothing to compare with. {error.summary()}"
            return Checked(case, ok=False, reason=reason, is_known=False)
        try:
            logits = self._compute_once(case.tried)
        except WorkerCrashedError as error:
            return Checked(case, ok=False, reason=f"It {how_it_ended(error)} with {case.words}.")
        except WorkerStalledError as error:
            if endpoints:
                self.silent |= endpoints
                # The result says nothing about the engine on that device.
                return Checked(
                    case, ok=False, reason=error_with_endpoints(error, sorted(endpoints)).summary(), is_known=False
                )
            reason = f"It {how_it_ended(error)} with {case.words}."
            return Checked(case, ok=False, reason=reason, is_known=False, is_stalled=True)
        except EngineError as error:
            raise_if_cancelled(self.cancel)
            return Checked(case, ok=False, reason=error.summary(), is_known=False)
        difference = _difference(expected, logits)
        seconds = time.monotonic() - begun_s
        if difference is not None and difference <= case.tolerance:
            return Checked(case, ok=True, difference=difference, seconds=seconds)
        what = "values that are not finite" if not logits else "wrong values"
        return Checked(case, False, f"It computes {what} with {case.words}.", difference, seconds)

    def _compute_once(self, trial: Trial) -> tuple[float, ...]:
        """Return the logits of all prompts of a trial, concatenated; empty if some are not finite.

        Results are cached.
        """
        if trial not in self._computed:
            self._computed[trial] = self._compute(trial)
        return self._computed[trial]

    def _compute(self, trial: Trial) -> tuple[float, ...]:
        devices = tuple(ref for ref in device_refs(self.rig) if ref.id in trial.devices)
        load = Load(path=str(trial.model), devices=devices, parameters=trial.parameters, context=trial.context)
        # A child for each case: a kernel that aborts ends that child, and no other case.
        with BlockingChild(
            timeout_s=TIMEOUT_S,
            argv=self.argv,
            cancel=self.cancel,
            name="engine check",
            environment={**environment_for(self.rig, trial.devices), **(self.environment or {})},
        ) as child:
            answer = child.ask(load, LoadReply)
            if isinstance(answer, AllocationFailure):
                raise EngineError(f"{answer.device} has no room for it: {answer.text}.")
            samples = [child.ask(Logits(tokens=tokens), LogitDigest).sample for tokens in PROMPTS]
        return tuple(value for sample in samples for value in sample) if all(samples) else ()


def how_it_ended(error: WorkerCrashedError | WorkerStalledError) -> str:
    """Return how a child process ended, as a predicate such as "dies (SIGSEGV)"."""
    if isinstance(error, WorkerStalledError):
        return "hangs"
    if error.signal is None:
        return f"ends with exit code {error.exit_code}"
    try:
        return f"dies ({signals.Signals(error.signal).name})"
    except ValueError:
        return f"dies (signal {error.signal})"


def _difference(expected: Sequence[float], found: Sequence[float]) -> float | None:
    """Return the error of the logits `found`: the mean squared difference from `expected`, divided by the variance of
    `expected`.

    None if the two lists differ in length, or if they are empty.
    """
    if not expected or len(expected) != len(found):
        return None
    mean = sum(expected) / len(expected)
    # Equal logits have no variance to divide by.
    spread = sum((value - mean) ** 2 for value in expected) or 1.0
    return sum((one - other) ** 2 for one, other in zip(expected, found, strict=True)) / spread

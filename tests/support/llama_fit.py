"""Recorded results of llama.cpp's own fit on devices of given sizes (`tests/zoo/fit`), as our rigs and layouts."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator
from typing import Any

from msgspec import Struct

from engine.devices.device import Device, Rig, make_host
from engine.model.gguf.model_file import ModelFile
from engine.planning.layout.layout import Layout
from engine.planning.settings.context_settings import ContextSettings
from tests.support.truth import layout_of, truth_model
from tests.zoo.pack import FOLDER
from tests.zoo.record import DEFAULTS

FIT_NAMES = tuple(sorted(path.name.removesuffix(".json.gz") for path in (FOLDER / "fit").iterdir()))
_HOST_BYTES = 1 << 44
"""Memory of the host, which llama.cpp's fit regards as unlimited."""


class FitCase(Struct, frozen=True):
    """One rig for which llama.cpp's fit was recorded.

    `layout`: None if the fit found none.
    `placed_bytes`: weights and KV caches that llama.cpp then placed on devices other than the host.
    """

    model: ModelFile
    rig: Rig
    context: ContextSettings
    layout: Layout | None
    placed_bytes: int


def fit_cases(name: str) -> Iterator[FitCase]:
    """Yield the recorded cases of one model."""
    model = truth_model(name)
    for raw in json.loads(gzip.decompress((FOLDER / "fit" / f"{name}.json.gz").read_bytes())):
        yield _case(model, raw)


def _case(model: ModelFile, raw: dict[str, Any]) -> FitCase:
    count = len(raw["memory"])
    found = raw["status"] == 0 and "held" in raw
    # The engine reads free memory when its context is on the card already: the overhead is not in these numbers. Nor is
    # what a card takes while it answers, which is known of CUDA alone; SYCL's buffers are those of the stand-ins.
    devices = tuple(
        Device(
            id=f"D{number}",
            name="stand-in",
            backend="SYCL",
            kind="gpu",
            total_bytes=raw["memory"][number],
            margin_bytes=raw["margin"],
            overhead_bytes=0,
        )
        for number in range(count)
    )
    options = {**DEFAULTS, **raw, "device_order": list(range(count))}
    if found and options["tensor_split"] is None:
        options["tensor_split"] = [float(size) for size in raw["memory"]]
    return FitCase(
        model=model,
        rig=Rig(devices, make_host("host", _HOST_BYTES)),
        context=ContextSettings(n_ctx=raw["n_ctx"], n_ubatch=raw.get("n_ubatch", 512)),
        layout=layout_of(model, options) if found else None,
        placed_bytes=raw.get("placed_bytes", 0),
    )

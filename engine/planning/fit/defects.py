"""Detection of wrong forecasts: cases in which the memory estimate differs from llama.cpp's numbers by too much.

`defect_text` returns a log line with everything that is needed to reproduce such a case.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from engine.base.units import MIB
from engine.model.gguf.model_file import MetadataValue, ModelFile
from engine.planning.layout.layout_file import LayoutFile, layout_document
from engine.planning.plan.plan import Plan
from engine.planning.plan.report import DeviceRow

TOLERANCE = 0.03
TOLERANCE_BYTES = 8 * MIB
"""Difference in bytes between the estimate and llama.cpp's number up to which the estimate counts as correct.

For large numbers the share `TOLERANCE` allows a larger difference.
"""
MAX_NUMBERS = 256
"""Number of elements to which arrays of hyper-parameters are cut in the log line.

Arrays have one value per layer; no known model has more layers.
"""


def disagreements(estimated: Sequence[DeviceRow], reported: Sequence[DeviceRow]) -> tuple[str, ...]:
    """Return the ids of devices for which estimate and llama.cpp differ by more than the tolerance.

    `estimated`: rows of the estimate; `reported`: rows with llama.cpp's numbers. Overhead is not compared, because
    llama.cpp does not report it; nor is the projector's compute buffer, because it is never estimated.
    """
    expected = {row.id: row for row in estimated}
    return tuple(
        row.id
        for row in reported
        if row.id in expected and not _agree(_engine_bytes(expected[row.id]), _engine_bytes(row))
    )


def defect_text(plan: Plan, estimated: Sequence[DeviceRow], reported: Sequence[DeviceRow], engine: str) -> str:
    """Return one line of JSON for the log, with everything that is needed to reproduce a wrong forecast.

    The line contains no names of files, folders or computers.

    `estimated`: rows of the estimate; `reported`: rows with llama.cpp's numbers.
    `engine`: version of the engine.
    """
    model = plan.model
    tensors: dict[str, int] = {}
    for tensor in model.tensors:
        tensors[tensor.type_name] = tensors.get(tensor.type_name, 0) + 1
    document = {
        "devices": disagreements(estimated, reported),
        "engine": engine,
        "architecture": model.architecture,
        "hyper_parameters": _hyper_parameters(model),
        "n_vocab": model.n_vocab,
        "tensor_types": tensors,
        "layout": layout_document(LayoutFile("", plan.edit.layout, plan.edit.context)),
        "rig": [
            {"id": device.id, "backend": device.backend, "kind": device.kind, "total_bytes": device.total_bytes}
            for device in plan.rig.all_devices
        ],
        "estimated": _numbers(estimated),
        "engine_says": _numbers(reported),
    }
    return msgspec.json.encode(document).decode()


def _agree(expected_bytes: int, reported_bytes: int) -> bool:
    return abs(expected_bytes - reported_bytes) <= max(TOLERANCE_BYTES, round(TOLERANCE * reported_bytes))


def _engine_bytes(row: DeviceRow) -> int:
    return row.buffer_bytes - row.projector_bytes


def _numbers(rows: Sequence[DeviceRow]) -> dict[str, dict[str, int]]:
    kinds = ("weights", "mapped", "kv_cache", "recurrent", "compute", "output")
    return {row.id: {f"{kind}_bytes": getattr(row, f"{kind}_bytes") for kind in kinds} for row in rows}


def _hyper_parameters(model: ModelFile) -> dict[str, MetadataValue]:
    # Keys of the architecture are numbers of the model. Other metadata may name people, places and files.
    prefix = f"{model.architecture}."
    return {
        key.removeprefix(prefix): value[:MAX_NUMBERS] if isinstance(value, tuple) else value
        for key, value in model.metadata.items()
        if key.startswith(prefix) and value is not None and not isinstance(value, str)
    }

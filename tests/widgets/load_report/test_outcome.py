"""The texts and numbers of each ending of a load."""

from __future__ import annotations

import msgspec
import pytest

from engine.base.units import GIB, KIB, MIB
from engine.devices.device import Device, make_host
from engine.planning.memory.estimate import DeviceMemory, Grade
from engine.planning.plan.placement_check import DeviceDifference
from engine.planning.plan.report import DeviceRow, make_row
from engine.runtime.session.events import STAGE_TEXTS, Cancelled, Crashed, Failed, Loaded, OutOfMemory, Stage
from widgets.load_report.outcome import (
    cancelled_outcome,
    crashed_outcome,
    failed_outcome,
    format_difference,
    loaded_outcome,
    out_of_memory_outcome,
    time_text,
)
from widgets.load_report.report_table import plain_report, table_lines, visible_columns

WORKER = Device("RPC0", "attic", "RPC", "gpu", 8 * GIB, free_bytes=6 * GIB, endpoint="192.0.2.7:50052")
SPARE = Device("RPC1", "cellar", "RPC", "gpu", 8 * GIB, endpoint="192.0.2.8:50052")
HOST = make_host("Ryzen", 64 * GIB, 32 * GIB)


def row(device: Device, memory: DeviceMemory, grade: Grade = Grade.MEASURED) -> DeviceRow:
    return make_row(device, memory, grade)


def loaded(*, off_bytes: int = 0) -> Loaded:
    on_worker = DeviceMemory(weights_bytes=3 * GIB, kv_cache_bytes=512 * MIB, compute_bytes=100 * MIB)
    forecast = DeviceMemory(weights_bytes=3 * GIB, kv_cache_bytes=512 * MIB, compute_bytes=100 * MIB - off_bytes)
    on_host = DeviceMemory(mapped_bytes=2 * GIB, output_bytes=600 * KIB)
    return Loaded(
        devices=(row(WORKER, on_worker), row(SPARE, DeviceMemory()), row(HOST, on_host)),
        forecast=(
            row(WORKER, forecast, Grade.PROBED),
            row(SPARE, DeviceMemory(), Grade.PROBED),
            row(HOST, on_host, Grade.PROBED),
        ),
    )


def test_loaded_says_where_and_how_far_off() -> None:
    outcome = loaded_outcome(loaded(off_bytes=12 * MIB))

    assert (outcome.badge, outcome.tone) == ("LOADED", "good")
    assert outcome.sentence == "3.60 GiB of memory on RPC0 + CPU. The forecast was off by at most 12.0 MiB (RPC0)."
    assert "2.00 GiB of the model file are memory-mapped" in outcome.detail
    assert [entry.id for entry in outcome.rows] == ["RPC0", "CPU"]


def test_an_exact_forecast_is_worth_saying() -> None:
    assert loaded_outcome(loaded()).sentence.endswith("The forecast was exact.")


def test_a_device_that_only_the_forecast_has_or_only_the_load_uses_counts() -> None:
    both, host = loaded(), loaded().devices[2:]
    unused = Loaded(devices=host, forecast=both.forecast)
    assert loaded_outcome(unused).sentence.endswith("The forecast was off by at most 3.60 GiB (RPC0).")
    unexpected = Loaded(devices=both.devices, forecast=host)
    assert loaded_outcome(unexpected).sentence.endswith("The forecast was off by at most 3.60 GiB (RPC0).")


def test_a_load_without_forecast_says_so() -> None:
    event = Loaded(devices=loaded().devices, forecast=())

    assert loaded_outcome(event).sentence.endswith("No forecast was made.")
    assert all(line.forecast == () and line.difference == "" for line in table_lines(loaded_outcome(event)))


def test_the_table_shows_measured_beside_forecast() -> None:
    outcome = loaded_outcome(loaded(off_bytes=12 * MIB))

    titles = [column.title for column in visible_columns(outcome.rows)]
    assert titles == ["Weights", "Mapped", "KV cache", "Compute", "Output", "Total"]
    worker, host = table_lines(outcome)
    assert worker.measured == ("3.00 GiB", "–", "512.0 MiB", "100.0 MiB", "–", "3.60 GiB")
    assert worker.forecast == ("3.00 GiB", "–", "512.0 MiB", "88.0 MiB", "–", "3.59 GiB")
    assert worker.difference == "+12.0 MiB"
    assert (host.device, host.difference) == ("CPU", "0 B")


def test_rare_parts_have_a_column_when_there_are_some() -> None:
    memory = DeviceMemory(recurrent_bytes=MIB, overhead_bytes=MIB)

    titles = {column.title for column in visible_columns([row(WORKER, memory)])}

    assert {"State", "Overhead"} <= titles
    assert "Mapped" not in titles


def out_of_memory(*, free_bytes: int | None) -> OutOfMemory:
    return OutOfMemory(
        stage="context",
        device="RPC0",
        requested_bytes=2 * GIB,
        free_bytes=free_bytes,
        allocated=(row(WORKER, DeviceMemory(weights_bytes=3 * GIB)), row(SPARE, DeviceMemory())),
        message="failed to allocate RPC0 buffer of size 2147483648",
    )


@pytest.mark.parametrize(
    ("free_bytes", "sentence"),
    [
        (
            1536 * MIB,
            "RPC0 (attic) needed 2.00 GiB, but had only 1.50 GiB free: 512.0 MiB missing.",
        ),
        (None, "RPC0 (attic) could not allocate 2.00 GiB."),
        (
            3 * GIB,
            "RPC0 (attic) needed 2.00 GiB in one piece; 3.00 GiB are free, but fragmented.",
        ),
    ],
)
def test_out_of_memory_names_the_device_and_the_bytes(free_bytes: int | None, sentence: str) -> None:
    outcome = out_of_memory_outcome(out_of_memory(free_bytes=free_bytes), {"RPC0": "attic"})

    assert (outcome.badge, outcome.tone, outcome.sentence) == ("OUT OF MEMORY", "bad", sentence)
    assert outcome.detail == "failed to allocate RPC0 buffer of size 2147483648"
    assert plain_report(outcome).endswith("\n\nfailed to allocate RPC0 buffer of size 2147483648\n")
    assert outcome.rows_title == "Allocated before the failure"
    assert [entry.id for entry in outcome.rows] == ["RPC0"]


@pytest.mark.parametrize(
    ("short_bytes", "end"),
    [
        (3 << 30, ". 512.0 MiB are missing for this buffer, and 3.00 GiB for the whole layout."),
        (512 << 20, ": 512.0 MiB missing."),
        (0, ": 512.0 MiB missing."),
    ],
)
def test_what_the_whole_layout_lacks_is_told_beside_the_refused_buffer(short_bytes: int, end: str) -> None:
    event = out_of_memory(free_bytes=3 << 29)
    assert out_of_memory_outcome(event, {}, short_bytes=short_bytes).sentence.endswith(end)


def test_a_device_without_a_name_is_called_by_its_id() -> None:
    assert out_of_memory_outcome(out_of_memory(free_bytes=0), {}).sentence.startswith("RPC0 needed")
    assert out_of_memory_outcome(out_of_memory(free_bytes=0), {"RPC0": "RPC0"}).sentence.startswith("RPC0 needed")


@pytest.mark.parametrize("stage", list(STAGE_TEXTS))
def test_every_stage_has_words(stage: Stage) -> None:
    assert STAGE_TEXTS[stage] in cancelled_outcome(Cancelled(stage=stage)).sentence


def test_failures_and_crashes_keep_their_message() -> None:
    failed = failed_outcome(Failed(kind="busy", message="192.0.2.7:50052 serves somebody else."))
    crashed = crashed_outcome(Crashed(kind="crashed", signal=9, message="The engine process was ended by SIGKILL."))

    assert (failed.badge, failed.tone, failed.sentence) == ("FAILED", "bad", "192.0.2.7:50052 serves somebody else.")
    assert (crashed.badge, crashed.tone) == ("CRASHED", "bad")
    assert crashed.sentence == "The engine process was ended by SIGKILL."
    assert "again" not in crashed.detail
    assert "Help > Check This Computer" in crashed.detail


@pytest.mark.parametrize(("size_bytes", "text"), [(0, "0 B"), (5 * MIB, "+5.0 MiB"), (-5 * MIB, "-5.0 MiB")])
def test_differences_have_a_sign(size_bytes: int, text: str) -> None:
    assert format_difference(size_bytes) == text


def test_the_copied_report_is_a_table_of_text() -> None:
    text = plain_report(loaded_outcome(loaded(off_bytes=12 * MIB)))

    lines = text.splitlines()
    assert lines[0].startswith("LOADED: 3.60 GiB of memory on RPC0 + CPU.")
    head = next(line for line in lines if line.startswith("device"))
    worker = next(line for line in lines if line.startswith("RPC0"))
    forecast = lines[lines.index(worker) + 1]
    assert head.split() == ["device", "Weights", "Mapped", "KV", "cache", "Compute", "Output", "Total", "Difference"]
    assert worker.endswith("+12.0 MiB")
    assert len(worker) == len(head)
    assert forecast.split()[:3] == ["forecast", "3.00", "GiB"]
    assert text.endswith("\n")


def test_the_copied_report_of_a_failure_has_no_table() -> None:
    text = plain_report(failed_outcome(Failed(kind="busy", message="RPC0 serves somebody else.")))

    assert text == "FAILED: RPC0 serves somebody else.\n"


def test_what_is_elsewhere_and_the_time_by_stage_are_part_of_the_report() -> None:
    event = msgspec.structs.replace(
        loaded(),
        elsewhere=(DeviceDifference("layer", 3, "CUDA0", "CPU"),),
        seconds={"header": 0.01, "allocate": 1.0, "read": 8.0, "context": 0.6, "warm_up": 0.4},
    )
    lines = loaded_outcome(event).detail.splitlines()
    assert lines[0] == "Layer 3: loaded on CPU, not on CUDA0."
    assert lines[-1] == (
        "The load took 10.0 s: allocating memory for the weights 1.0 s, reading the weights 8.0 s, "
        "setting up the context (KV cache and compute buffers) 0.6 s."
    )
    assert time_text({"read": 0.04}) == "The load took 0.0 s."
    assert time_text({}) == ""

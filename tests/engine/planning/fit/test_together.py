"""Several models planned at once: memory adds up on each device, and small models take the slowest device with room."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest

from engine.base.errors import ArgumentError
from engine.base.units import GIB
from engine.base.values import replace
from engine.devices.device import Device, Rig
from engine.model.gguf.reader import read_model
from engine.planning.fit.together import (
    Together,
    Wanted,
    plan_together,
    rig_after,
    small_models,
    together_sentence,
)
from engine.planning.memory.model_memory import ModelMemory
from engine.planning.settings.context_settings import ContextSettings
from engine.planning.speed.speeds import NO_MEASUREMENTS
from tests.support.models import write_header_only
from tests.support.previews import make_gpu, make_rig

SHAPES: dict[str, dict[str, Any]] = {
    "big": {"n_layers": 80, "n_embd": 8192, "n_head": 64, "n_ff": 28672, "n_vocab": 128256},  # 36 GiB
    "middle": {"n_layers": 48, "n_embd": 5120, "n_head": 40, "n_ff": 13824, "n_vocab": 152064},  # 7 GiB
    "chat": {"n_layers": 32, "n_embd": 4096, "n_head": 32, "n_ff": 14336, "n_vocab": 32000},  # 4 GiB
    "tiny": {"n_layers": 12, "n_embd": 768, "n_head": 12, "n_ff": 3072, "n_vocab": 30000},
}


@cache
def wanted(name: str) -> Wanted:
    with TemporaryDirectory() as folder:
        model = read_model(write_header_only(Path(folder) / f"{name}.gguf", **SHAPES[name]))
    return Wanted(name, ModelMemory(model), ContextSettings(n_ctx=4096))


def planned(rig: Rig, *names: str) -> Together:
    return plan_together([wanted(name) for name in names], rig, NO_MEASUREMENTS)


def test_what_the_models_need_together_is_free_on_each_device() -> None:
    found = planned(make_rig(make_gpu("CUDA0", 24), make_gpu("CUDA1", 24)), "middle", "chat", "tiny")
    assert found.is_whole
    assert found.leave_out is None
    assert together_sentence(found) == "All 3 models fit without the CPU."
    for device in found.rig.devices:
        assert found.need_bytes(device.id) + device.margin_bytes <= device.available_bytes
        # Each process has its own overhead, and only on devices that it uses.
        assert found.need_bytes(device.id) == sum(
            row.need_bytes for each in found.placed for row in each.plan.forecast if row.id == device.id
        )


def test_a_model_takes_only_what_the_ones_before_it_leave() -> None:
    found = planned(make_rig(make_gpu("CUDA0", 16)), "middle", "chat")
    first, second = found.placed
    free = {row.id: row.free_bytes for row in second.plan.forecast}
    assert free["CUDA0"] == found.rig.devices[0].available_bytes - first.need_bytes["CUDA0"]


def test_small_models_go_to_the_slowest_device_with_room() -> None:
    slow = make_gpu("CUDA1", 8, name="GTX 1060")
    found = planned(make_rig(make_gpu("CUDA0", 24), slow), "middle", "tiny")
    assert small_models([wanted("middle"), wanted("tiny")]) == {"tiny"}
    assert found.find("tiny").plan.edit.layout.devices == ("CUDA1",)
    assert found.find("middle").plan.edit.layout.devices == ("CUDA0",)


def test_a_model_that_is_too_large_anyway_does_not_cost_the_others_their_devices() -> None:
    found = planned(make_rig(make_gpu("CUDA0", 24), make_gpu("CUDA1", 12)), "big", "middle", "tiny")
    assert found.fits
    assert found.find("middle").is_whole
    assert found.find("tiny").is_whole
    assert not found.find("big").is_whole
    assert f"big has {found.find('big').n_host_layers} of 80 layers on the CPU" in together_sentence(found)


def test_the_sentence_names_who_gives_way_and_the_gain() -> None:
    found = planned(make_rig(make_gpu("CUDA0", 10)), "middle", "chat")
    assert not found.is_whole
    assert found.leave_out is not None
    sentence = together_sentence(found)
    # The less important one is left out, if the other is then wholly on devices; here that one has it already.
    assert found.find("middle").is_whole
    assert "Leave out middle: without this model, chat fits without the CPU" in sentence
    assert "tokens/s instead of" in sentence


def test_models_that_do_not_fit_at_all_are_named() -> None:
    host = make_rig(host_gib=6)
    found = planned(host, "middle", "chat")
    assert not found.fits
    assert "would not fit together with the other models" in together_sentence(found)


def test_four_models_on_eight_full_cards_need_few_searches() -> None:
    tried = 0

    def count(_n_tried: int) -> None:
        nonlocal tried
        tried += 1

    from engine.planning.fit.strategies.constraints import Constraints, SearchLimit

    rig = make_rig(*(make_gpu(f"CUDA{number}", 5) for number in range(8)))
    names = ("big", "middle", "chat", "tiny")
    found = plan_together(
        [wanted(name) for name in names],
        rig,
        NO_MEASUREMENTS,
        constraints=Constraints(watch=SearchLimit(on_tried=count)),
    )
    assert found.fits
    # 0.8 s of processor time on the machine where it was written; the number of layouts does not depend on that.
    # All but the model that is too large anyway are whole in the first order, so no other order is tried.
    assert tried < 270


def test_a_worker_serves_one_of_the_models() -> None:
    worker = Device("RPC0", "worker", "RPC", "gpu", 8 * GIB, endpoint="127.0.0.1:50052")
    left = rig_after(make_rig(worker), {"RPC0": GIB})
    assert left.devices[0].available_bytes == 0


def test_a_cap_counts_for_all_models_together() -> None:
    card = replace(make_gpu("CUDA0", 24), cap_bytes=10 * GIB)
    left = rig_after(make_rig(card), {"CUDA0": 4 * GIB})
    assert left.devices[0].available_bytes == 6 * GIB


@pytest.mark.parametrize("names", [(), ("tiny", "tiny"), ("tiny",) * 9])
def test_a_choice_that_cannot_be_planned_is_refused(names: tuple[str, ...]) -> None:
    with pytest.raises(ArgumentError):
        planned(make_rig(make_gpu("CUDA0", 24)), *names)

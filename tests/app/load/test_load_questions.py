"""Questions before a load: whether memory must be freed, which models hold it, and how the user is asked."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from app.load.load_questions import idle_text, load_question
from engine.base.units import GIB
from engine.devices.device import Device, Rig, make_host
from engine.model.gguf.model_file import FileIdentity
from engine.planning.fit.loaded_models import HeldModel, rig_after_unload
from engine.planning.fit.unload_plan import UnloadPlan, plan_unloads
from engine.planning.memory.estimate import DeviceMemory, Grade
from engine.planning.plan.report import DeviceRow, make_row
from tests.support.load_specs import worker_device

CARD = Device("CUDA0", "card", "CUDA", "gpu", 24 * GIB, 2 * GIB)
RIG = Rig((CARD, worker_device("RPC0", "attic:1", 8 * GIB)), make_host("host", 64 * GIB, 60 * GIB))
NOW_S = 1000.0


def model(name: str, *endpoints: str, idle_since_s: float | None = 0.0, **held_bytes: int) -> HeldModel:
    key = FileIdentity(((1, hash(name), 0, 0),))
    return HeldModel(key, name, held_bytes, frozenset(endpoints), idle_since_s=idle_since_s)


ADA = model("ada", CUDA0=12 * GIB)
BOB = model("bob", CUDA0=8 * GIB, idle_since_s=880.0)
FAR = model("far", "attic:1", RPC0=4 * GIB, idle_since_s=None)


def rows(**need_bytes: int) -> list[DeviceRow]:
    return [
        make_row(device, DeviceMemory(weights_bytes=need_bytes.get(device.id, 0)), Grade.ESTIMATED)
        for device in RIG.all_devices
    ]


def beside(*models: HeldModel) -> Callable[[Sequence[HeldModel]], Rig]:
    return lambda leaving: rig_after_unload(RIG, models, leaving)


def test_what_fits_asks_nothing() -> None:
    assert plan_unloads(rows(CUDA0=2 * GIB), [ADA, BOB], beside(ADA, BOB)) == UnloadPlan()


def test_the_fewest_make_room() -> None:
    plan = plan_unloads(rows(CUDA0=12 * GIB), [ADA, BOB], beside(ADA, BOB))
    assert plan.victims == (ADA,)
    question = load_question(plan, "new", NOW_S)
    assert question.text == "new does not fit together with ada (idle for 16 min): it needs 10.00 GiB more on CUDA0."
    assert question.unload_text == "Unload ada and load"
    assert question.without_unload_text == "Load anyway"
    assert question.can_remember


def test_several_are_named_together() -> None:
    plan = plan_unloads(rows(CUDA0=22 * GIB), [ADA, BOB], beside(ADA, BOB))
    assert {victim.name for victim in plan.victims} == {"ada", "bob"}
    assert "together with ada (idle for 16 min) and bob (idle for 2 min)" in load_question(plan, "new", NOW_S).text


def test_a_worker_in_use_cannot_be_shared_and_an_answer_that_ends_is_said() -> None:
    plan = plan_unloads(rows(RPC0=GIB), [ADA, FAR], beside(ADA, FAR))
    assert plan.victims == (FAR,)
    question = load_question(plan, "new", NOW_S)
    assert question.text == (
        "new needs RPC0, which far (answering) is using. A worker serves one model at a time. "
        "The answer that far is writing would be stopped."
    )
    assert question.without_unload_text == ""
    assert not question.can_remember


def test_what_would_still_be_missing_on_a_worker_in_use_is_said() -> None:
    plan = plan_unloads(rows(RPC0=9 * GIB), [ADA, FAR], beside(ADA, FAR))
    assert plan.victims == (FAR,)
    assert load_question(plan, "new", NOW_S).text == (
        "new needs RPC0, which far (answering) is using. A worker serves one model at a time. "
        "Even after the unload it would need 1.00 GiB more on RPC0. The answer that far is writing would be stopped."
    )


def test_what_never_fits_names_who_holds_the_short_device_and_can_be_tried() -> None:
    plan = plan_unloads(rows(CUDA0=30 * GIB), [ADA, BOB, FAR], beside(ADA, BOB, FAR))
    assert {victim.name for victim in plan.victims} == {"ada", "bob"}
    text = load_question(plan, "new", NOW_S).text
    assert text.startswith("new does not fit, even without ada")
    assert text.endswith("it would need 8.00 GiB more on CUDA0.")


def test_where_nobody_is_in_the_way_the_load_is_tried() -> None:
    host = plan_unloads(rows(CPU=100 * GIB), [ADA, FAR], beside(ADA, FAR))
    assert host.victims == ()


def test_idle_times_are_told_in_whole_minutes_and_hours() -> None:
    assert idle_text(FAR, NOW_S) == "answering"
    assert idle_text(model("x", idle_since_s=950.0), NOW_S) == "idle"
    assert idle_text(model("x", idle_since_s=940.0), NOW_S) == "idle for 1 min"
    assert idle_text(model("x", idle_since_s=0.0), 3599.0) == "idle for 59 min"
    assert idle_text(model("x", idle_since_s=0.0), 7300.0) == "idle for 2 h"


def test_long_names_are_shortened_in_the_question_and_whole_in_its_tool_tip() -> None:
    long = "Some-Family-30B-A3B-Instruct-2507-Q4_K_M-00001-of-00003"
    plan = UnloadPlan((model(long),), short=(("CUDA0", GIB),))
    question = load_question(plan, long, NOW_S)
    assert long not in question.text
    assert "Some-Family-30B-A3B-Ins…of-00003 does not fit" in question.text
    assert question.unload_text == "Unload Some-Family-30B-A3B-Ins…of-00003 and load"
    assert question.unload_tool_tip == f"Unload {long} and load {long}"


def test_several_models_are_counted_on_the_button() -> None:
    plan = UnloadPlan((ADA, BOB), short=(("CUDA0", GIB),))
    question = load_question(plan, "new", NOW_S)
    assert question.unload_text == "Unload 2 models and load"
    assert question.unload_tool_tip == "Unload ada and bob and load new"

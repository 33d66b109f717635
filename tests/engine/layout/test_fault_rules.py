"""What the engine does wrongly on a device: refused by rules, avoided by automatic layouts, and forecast."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import pytest

from engine.devices.device import CPU_ID, Device, Fault, Rig, make_host
from engine.devices.rig_file import encode_rig, parse_rig
from engine.fit.strategies.catalogue import STRATEGIES, auto_layout
from engine.gguf.model_file import ModelFile
from engine.gguf.reader import read_model
from engine.layout.layout import Layout, Run, single_device
from engine.plan.edit import Edit
from engine.plan.known_faults import known_words
from engine.plan.plan import Plan, make_plan
from engine.settings.context_settings import ContextSettings
from engine.units import GIB
from tests.support.models import write_tiny_llama

CONTEXT = ContextSettings(n_ctx=256, n_batch=64, n_ubatch=64, threads=1)
SOUND = Device("CUDA1", "card", "CUDA", "gpu", GIB, GIB)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> ModelFile:
    path = tmp_path_factory.mktemp("model") / "m.gguf"
    return read_model(write_tiny_llama(path, n_layers=4, n_embd=128, file_type="Q4_0"))


def rig_with(*faults: Fault, host: tuple[Fault, ...] = ()) -> Rig:
    broken = replace(SOUND, id="CUDA0", total_bytes=2 * GIB, free_bytes=2 * GIB, faults=faults)
    return Rig((broken, SOUND), replace(make_host("host", 8 * GIB, 8 * GIB), faults=host))


def plan_on(model: ModelFile, rig: Rig, device: str = "CUDA0", **settings: object) -> Plan:
    context = msgspec.structs.replace(CONTEXT, **settings)
    return make_plan(model, rig, Edit(single_device(model.n_layers, device), context))


def test_weights_that_a_device_cannot_use_are_refused_there_and_only_there(model: ModelFile) -> None:
    rig = rig_with(Fault("weights", "It dies (SIGSEGV).", "Q4_0"))
    (violation,) = plan_on(model, rig).violations
    assert violation.rule == "engine_fault"
    assert "Q4_0 weights on CUDA0: It dies (SIGSEGV)." in violation.message
    assert plan_on(model, rig, "CUDA1").violations == ()
    assert plan_on(model, rig_with(Fault("weights", "It dies.", "Q5_0"))).violations == ()


def test_automatic_layouts_leave_such_a_device_alone(model: ModelFile) -> None:
    rig = rig_with(Fault("weights", "It dies.", "Q4_0"))
    for name in STRATEGIES:
        found = auto_layout(name, model, rig, CONTEXT)
        assert "CUDA0" not in found.layout.devices, name
        assert found.fits, name
    assert "CUDA0" in auto_layout("fewest", model, rig_with(), CONTEXT).layout.devices


def test_flash_attention_is_off_where_it_is_broken_and_refused_where_it_is_asked_for(model: ModelFile) -> None:
    rig = rig_with(Fault("flash_attention", "It computes nonsense.", "f16"))
    plan = plan_on(model, rig)
    assert plan.settings.flash_attn == "off"
    assert plan.violations == ()
    (decision,) = [each for each in plan.decisions if each.setting == "flash_attn"]
    assert (decision.value, decision.overridden) == ("off", False)
    assert decision.reason == "It is broken on CUDA0: It computes nonsense."
    assert [each.rule for each in plan_on(model, rig, flash_attn="on").violations] == ["engine_fault"]
    assert plan_on(model, rig, flash_attn="off").violations == ()
    assert plan_on(model, rig, type_k="q8_0", type_v="q8_0").settings.flash_attn == "auto"
    quantised = rig_with(Fault("flash_attention", "It dies.", "q8_0"))
    assert [each.rule for each in plan_on(model, quantised, type_v="q8_0").violations] == ["engine_fault"]
    assert plan_on(model, rig, "CUDA1").settings.flash_attn == "auto"


def test_a_split_says_why_a_device_is_no_member(model: ModelFile) -> None:
    fault = Fault("tensor_split", "It dies (SIGSEGV) with split mode tensor.")
    rig = rig_with(fault)
    able = replace(rig.devices[0], capabilities=replace(SOUND.capabilities, tensor_split=False))
    layout = Layout(4, (Run("CUDA0", 0, 1), Run("CUDA1", 2, 3)), "CUDA1", "tensor", (("CUDA0", 1.0), ("CUDA1", 1.0)))
    plan = make_plan(model, Rig((able, SOUND), rig.host), Edit(layout, CONTEXT))
    assert [each.message for each in plan.violations] == [
        "CUDA0 cannot be a member of split mode tensor: It dies (SIGSEGV) with split mode tensor."
    ]


def test_without_the_cpus_own_order_weights_stay_pages_of_the_file(model: ModelFile) -> None:
    fault = Fault("extra_buffers", "It dies (SIGSEGV) with Q4_0 weights in the CPU's own order.")
    usual, plain = (plan_on(model, rig_with(host=faults), CPU_ID, load_mode="mmap") for faults in ((), (fault,)))
    assert (usual.parameters.extra_buffers, plain.parameters.extra_buffers) == (True, False)
    assert usual.forecast[-1].weights_bytes > 0
    assert plain.forecast[-1].weights_bytes == 0
    assert [each.rule for each in plain.advice] == ["extra_buffers_off"]
    assert fault.reason in plain.advice[0].message
    assert usual.key != plain.key


def test_faults_travel_with_a_rig_file() -> None:
    rig = rig_with(Fault("weights", "It dies.", "Q4_0"), host=(Fault("extra_buffers", "It dies too."),))
    again = parse_rig(encode_rig(rig))
    assert again.devices[0].faults == rig.devices[0].faults
    assert again.host.faults == rig.host.faults


def test_a_crash_names_what_is_known(model: ModelFile) -> None:
    unchecked = known_words(plan_on(model, rig_with()))
    assert unchecked == "The engine has not been checked on CUDA0 yet."
    assert "Known of it: CUDA0: It dies." in known_words(plan_on(model, rig_with(Fault("weights", "It dies.", "Q5_0"))))
    rig = rig_with()
    checked = Rig((replace(rig.devices[0], is_checked=True), SOUND), rig.host)
    assert "found nothing wrong with the engine on CUDA0" in known_words(plan_on(model, checked))

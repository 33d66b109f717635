"""Faults of the engine on a device: refused by rules, avoided by automatic layouts, and forecast."""

from __future__ import annotations

import msgspec
import pytest

from engine.base.units import GIB
from engine.base.values import replace
from engine.devices.device import CPU_ID, Device, Fault, Findings, Rig, make_host
from engine.devices.rig_file import encode_rig, parse_rig
from engine.model.gguf.model_file import ModelFile, TensorInfo
from engine.model.gguf.reader import read_model
from engine.planning.fit.strategies.catalogue import STRATEGIES, auto_layout
from engine.planning.fit.strategies.constraints import Constraints
from engine.planning.layout.layout import Layout, Run, single_device
from engine.planning.plan.edit import Edit
from engine.planning.plan.plan import Plan, self_test_text
from engine.planning.settings.context_settings import ContextSettings
from tests.support.models import write_tiny_llama
from tests.support.plans import make_plan

CONTEXT = ContextSettings(n_ctx=256, n_batch=64, n_ubatch=64, threads=1)
SOUND = Device("CUDA1", "card", "CUDA", "gpu", GIB, GIB)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> ModelFile:
    path = tmp_path_factory.mktemp("model") / "m.gguf"
    return read_model(write_tiny_llama(path, n_layers=4, n_embd=256, file_type="Q4_0"))


def rig_with(*faults: Fault, host: tuple[Fault, ...] = ()) -> Rig:
    broken = replace(SOUND, id="CUDA0", total_bytes=2 * GIB, free_bytes=2 * GIB, findings=Findings(faults))
    return Rig((broken, SOUND), replace(make_host("host", 8 * GIB, 8 * GIB), findings=Findings(host)))


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


def with_finer_output(model: ModelFile, name: str, weight_type: str) -> ModelFile:
    """Return `model` with another type of its output matrix, which is the tensor called `name`."""

    def finer(tensors: tuple[TensorInfo, ...]) -> tuple[TensorInfo, ...]:
        kept = (each for each in tensors if name == "output.weight" or each.name != "output.weight")
        return tuple(replace(each, type_name=weight_type) if each.name == name else each for each in kept)

    return replace(model, tensors=finer(model.tensors), global_tensors=finer(model.global_tensors))


@pytest.mark.parametrize("name", ["output.weight", "token_embd.weight"])
def test_weights_of_the_output_count_where_the_output_is(model: ModelFile, name: str) -> None:
    finer = with_finer_output(model, name, "Q8_0")
    rig = rig_with(Fault("weights", "It dies.", "Q8_0"))
    (violation,) = plan_on(finer, rig).violations
    assert "Q8_0 weights on CUDA0: It dies." in violation.message
    elsewhere = replace(single_device(finer.n_layers, "CUDA0"), output_device="CUDA1")
    assert make_plan(finer, rig, Edit(elsewhere, CONTEXT)).violations == ()
    assert plan_on(model, rig).violations == ()


def test_every_member_of_a_split_has_a_part_of_the_output(model: ModelFile) -> None:
    finer = with_finer_output(model, "output.weight", "Q8_0")
    shares = (("CUDA0", 1.0), ("CUDA1", 1.0))
    layout = Layout(4, (Run("CUDA0", 0, 1), Run("CUDA1", 2, 3)), "CUDA1", "tensor", shares)
    plan = make_plan(finer, rig_with(Fault("weights", "It dies.", "Q8_0")), Edit(layout, CONTEXT))
    assert [each.rule for each in plan.violations] == ["engine_fault"]


def test_automatic_layouts_put_no_output_where_its_weights_are_broken(model: ModelFile) -> None:
    finer = with_finer_output(model, "output.weight", "Q8_0")
    rig = rig_with(Fault("weights", "It dies.", "Q8_0"))
    for name in STRATEGIES:
        found = auto_layout(name, finer, rig, CONTEXT)
        assert found.layout.output_device != "CUDA0", name
        assert found.fits, name
    beside = auto_layout("fewest", finer, rig, CONTEXT, Constraints(off=frozenset({"CUDA1"}), output=CPU_ID))
    assert "CUDA0" in beside.layout.devices, "its layers are of another type"


@pytest.mark.parametrize("written", ["q4_0", "Q4_0"])
def test_a_type_may_be_written_in_small_letters(model: ModelFile, written: str) -> None:
    rig = rig_with(Fault("weights", "It dies.", written), Fault("flash_attention", "It dies.", written.swapcase()))
    assert [each.rule for each in plan_on(model, rig).violations] == ["engine_fault"]
    assert plan_on(model, rig, type_k="q4_0").settings.flash_attn == "off"


def test_flash_attention_is_off_where_it_is_broken_and_refused_where_it_is_asked_for(model: ModelFile) -> None:
    rig = rig_with(Fault("flash_attention", "It computes nonsense.", "f16"))
    plan = plan_on(model, rig)
    assert plan.settings.flash_attn == "off"
    assert plan.violations == ()
    (decision,) = [each for each in plan.decisions if each.setting == "flash_attn"]
    assert (decision.value, decision.overridden) == ("off", False)
    assert decision.reason == "Flash attention does not work correctly on CUDA0: It computes nonsense."
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
        "CUDA0 cannot be used in split mode tensor: It dies (SIGSEGV) with split mode tensor."
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
    assert again.devices[0].findings == rig.devices[0].findings
    assert again.host.findings == rig.host.findings


def test_a_crash_names_what_is_known(model: ModelFile) -> None:
    unchecked = self_test_text(plan_on(model, rig_with()))
    assert unchecked == "The engine has not been checked on CUDA0 yet."
    faulty = rig_with(Fault("weights", "It dies.", "Q5_0"))
    assert "Known faults: CUDA0: It dies." in self_test_text(plan_on(model, faulty))
    rig = rig_with()
    checked = Rig((replace(rig.devices[0], findings=Findings(is_checked=True)), SOUND), rig.host)
    assert "engine check on CUDA0 found no fault" in self_test_text(plan_on(model, checked))

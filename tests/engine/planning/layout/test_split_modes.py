"""Split modes: which are offered, why others are not, and the layout that a choice makes."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from engine.base.units import GIB
from engine.base.values import replace
from engine.devices.device import Capabilities, Device, Rig, make_host
from engine.planning.layout.layout import Run, make_layout, single_device
from engine.planning.layout.rules import violations
from engine.planning.layout.split_modes import layout_in_mode, split_mode_obstacles, with_shares
from engine.planning.settings.context_settings import ContextSettings
from tests.support.load_specs import N_LAYERS, made_up_model, worker_device

BIG = Device("CUDA0", "card", "CUDA", "gpu", 3 * GIB, free_bytes=3 * GIB)
SMALL = worker_device("RPC0", "attic:50052", GIB)
HOST = make_host("host", 4 * GIB)
RIG = Rig((BIG, SMALL), HOST)


def test_every_mode_that_cannot_be_says_why() -> None:
    assert set(split_mode_obstacles(RIG)) == {"row"}
    assert "CUDA0 and RPC0 do not support" in split_mode_obstacles(RIG)["row"]
    assert set(split_mode_obstacles(Rig((), HOST))) == {"row", "tensor"}
    unable = replace(BIG, capabilities=Capabilities(tensor_split=False))
    assert "No device can be used" in split_mode_obstacles(Rig((unable,), HOST))["tensor"]
    model = replace(made_up_model(), architecture="mamba")
    assert "cannot split mamba models" in split_mode_obstacles(RIG, model)["tensor"]
    assert "tensor" not in split_mode_obstacles(RIG, made_up_model())
    row = Rig((replace(BIG, capabilities=Capabilities(row_split=True)),), HOST)
    assert "row" not in split_mode_obstacles(row)


def test_choosing_tensor_takes_every_able_device_by_free_memory() -> None:
    tensor = layout_in_mode(single_device(8, "RPC0"), "tensor", RIG)
    assert tensor.tensor_split == (("CUDA0", 75.0), ("RPC0", 25.0))
    assert tensor.runs == (Run("CUDA0", 0, 5), Run("RPC0", 6, 7))
    assert tensor.output_device == "RPC0"
    behind = layout_in_mode(make_layout(8, ["CPU"] * 4 + ["RPC0"] * 4), "tensor", RIG)
    assert behind.runs == (Run("CPU", 0, 3), Run("CUDA0", 4, 6), Run("RPC0", 7, 7))
    assert layout_in_mode(single_device(8, "CPU"), "tensor", RIG).runs[0].device == "CUDA0"
    assert layout_in_mode(tensor, "layer", RIG).tensor_split == ()
    full = Rig((replace(BIG, free_bytes=0), replace(SMALL, free_bytes=0)), HOST)
    assert layout_in_mode(single_device(8, "RPC0"), "tensor", full).tensor_split == (("CUDA0", 50.0), ("RPC0", 50.0))


def test_a_layer_stays_to_be_split_if_all_are_moved_to_the_cpu() -> None:
    tensor = layout_in_mode(single_device(8, "RPC0"), "tensor", RIG).move_range(0, 7, "CPU")
    assert with_shares(tensor, (("CUDA0", 1.0),)).runs == (Run("CPU", 0, 6), Run("CUDA0", 7, 7))


@given(
    st.integers(0, N_LAYERS - 1),
    st.tuples(st.floats(0, 100), st.floats(0, 100)).filter(lambda shares: any(share >= 1 for share in shares)),
)
def test_any_shares_make_a_layout_that_can_be_loaded(leading: int, shares: tuple[float, float]) -> None:
    start = make_layout(N_LAYERS, ["CPU"] * leading + ["RPC0"] * (N_LAYERS - leading))
    tensor = with_shares(layout_in_mode(start, "tensor", RIG), tuple(zip(("CUDA0", "RPC0"), shares, strict=True)))
    model = made_up_model()
    assert tensor.n_layers == N_LAYERS
    assert tensor.assignment()[:leading] == ("CPU",) * leading
    assert violations(tensor, model, RIG, ContextSettings()) == ()
    assert violations(layout_in_mode(tensor, "layer", RIG), model, RIG, ContextSettings()) == ()

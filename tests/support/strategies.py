"""Hypothesis strategies for layouts, rigs and context settings."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from hypothesis import strategies as st

from engine.base.texts import clean
from engine.devices.device import BufferFacts, Capabilities, Device, Rig, make_host
from engine.planning.layout.layout import SPLIT_MODES, Layout, Override, make_layout
from engine.planning.layout.patterns import OVERRIDE_PARTS
from engine.planning.settings.context_settings import FLASH_ATTENTION_MODES, KV_TYPES, LOAD_MODES, ContextSettings

DEVICE_IDS = ("CPU", "CUDA0", "CUDA1", "RPC0", "RPC1", "Metal-0", "a.b_c")
PATTERNS = (r"blk\.0\.ffn_.*", "^output", "ffn_(up|down)", "[0-9]+", "a{1,3}$", "Γ(?:x|y)\\Wz")

sizes = st.integers(min_value=1, max_value=1 << 45)
names = st.text(st.characters(codec="utf-8"), max_size=20).map(clean)


@st.composite
def layouts(draw: st.DrawFn, max_layers: int = 200, max_runs: int = 14, devices: Sequence[str] = DEVICE_IDS) -> Layout:
    """Layouts of mode layer with up to `max_runs` runs, the output layer on any device."""
    n_layers = draw(st.integers(1, max_layers))
    cuts = draw(st.lists(st.integers(0, n_layers - 1), max_size=max_runs - 1, unique=True))
    bounds = [*sorted({0, *cuts}), n_layers]
    chosen = draw(st.lists(st.sampled_from(devices), min_size=len(bounds) - 1, max_size=len(bounds) - 1))
    lengths = (end - start for start, end in itertools.pairwise(bounds))
    assignment = [device for device, length in zip(chosen, lengths, strict=True) for _ in range(length)]
    return make_layout(n_layers, assignment, draw(st.sampled_from(devices)))


@st.composite
def overrides(draw: st.DrawFn, n_layers: int) -> Override:
    """Overrides of a part, in all layers or a range, or of a pattern."""
    device = draw(st.sampled_from(DEVICE_IDS))
    if draw(st.booleans()):
        return Override(device, pattern=draw(st.sampled_from(PATTERNS)))
    part = draw(st.sampled_from(OVERRIDE_PARTS))
    if draw(st.booleans()):
        return Override(device, part=part)
    first = draw(st.integers(0, n_layers - 1))
    return Override(device, part=part, first=first, last=draw(st.integers(first, n_layers - 1)))


@st.composite
def any_layouts(draw: st.DrawFn) -> Layout:
    """Layouts of every mode, with overrides, shares and main devices."""
    layout = draw(layouts(max_layers=40))
    mode = draw(st.sampled_from(SPLIT_MODES))
    chosen = tuple(draw(st.lists(overrides(layout.n_layers), max_size=3)))
    if mode in ("tensor", "row"):
        members = draw(st.lists(st.sampled_from(DEVICE_IDS), min_size=1, unique=True))
        shares = tuple((member, draw(st.floats(0.125, 1e6))) for member in members)
        main = draw(st.none() | st.sampled_from(DEVICE_IDS)) if mode == "row" else None
        return Layout(layout.n_layers, layout.runs, layout.output_device, mode, shares, main, chosen)
    layout = layout.with_split_mode(mode)
    return Layout(layout.n_layers, layout.runs, layout.output_device, mode, overrides=chosen)


contexts = st.builds(
    ContextSettings,
    n_ctx=st.integers(1, (1 << 31) - 1),
    n_batch=st.integers(1, 4096),
    n_ubatch=st.integers(1, 4096),
    n_seq_max=st.integers(1, 256),
    type_k=st.sampled_from(KV_TYPES),
    type_v=st.sampled_from(KV_TYPES),
    flash_attn=st.sampled_from(FLASH_ATTENTION_MODES),
    offload_kqv=st.booleans(),
    op_offload=st.booleans(),
    swa_full=st.booleans(),
    kv_unified=st.booleans(),
    load_mode=st.sampled_from(LOAD_MODES),
    threads=st.none() | st.integers(1, 512),
    threads_batch=st.none() | st.integers(1, 512),
)


@st.composite
def rigs(draw: st.DrawFn) -> Rig:
    """Rigs of local and remote devices with distinct ids and endpoints."""
    ids = draw(st.lists(st.sampled_from([name for name in DEVICE_IDS if name != "CPU"]), unique=True))
    devices = tuple(draw(_devices(device_id, index)) for index, device_id in enumerate(ids))
    total_bytes = draw(sizes)
    return Rig(devices, make_host(draw(names), total_bytes, draw(st.none() | st.integers(0, total_bytes))))


@st.composite
def _devices(draw: st.DrawFn, device_id: str, index: int) -> Device:
    remote = draw(st.booleans())
    total_bytes = draw(sizes)
    return Device(
        id=device_id,
        name=draw(names),
        backend="RPC" if remote else draw(st.sampled_from(["CUDA", "Vulkan", "Metal", "BLAS"])),
        kind=draw(st.sampled_from(["gpu", "igpu", "accel"])),
        total_bytes=total_bytes,
        free_bytes=draw(st.none() | st.integers(0, total_bytes)),
        pci_bus_id=None if remote else draw(st.none() | st.just(f"0000:0{index}:00.0")),
        endpoint=f"10.0.0.{index}:50052" if remote else None,
        endpoint_device=draw(st.integers(0, 3)) if remote else 0,
        cap_bytes=draw(st.none() | sizes),
        margin_bytes=draw(st.just(0) | sizes),
        buffers=BufferFacts(mixes_streams=draw(st.booleans())),
        capabilities=Capabilities(draw(st.booleans()), draw(st.booleans())),
    )

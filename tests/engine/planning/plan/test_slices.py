"""Slices of layers in modes tensor and row: they are those of the forecast, and add up to the layer."""

from __future__ import annotations

import pytest

from engine.base.values import replace
from engine.devices.device import CPU_ID
from engine.model.gguf.reader import read_model
from engine.planning.layout.layout import Layout, make_layout, single_device
from engine.planning.plan.edit import Edit
from engine.planning.plan.plan import Plan
from engine.planning.plan.preview import Preview, PreviewCache, make_preview
from engine.planning.plan.slices import layer_slices
from engine.planning.settings.context_settings import ContextSettings
from tests.support.models import write_header_only
from tests.support.previews import make_gpu, make_rig

RIG = make_rig(make_gpu("CUDA0", 24), make_gpu("CUDA1", 12))
SHARES = (("CUDA0", 2.0), ("CUDA1", 1.0))


@pytest.fixture(scope="module")
def tables(tmp_path_factory: pytest.TempPathFactory) -> PreviewCache:
    path = tmp_path_factory.mktemp("files") / "moe.gguf"
    sizes = {"n_layers": 4, "n_embd": 2048, "n_head": 32, "n_ff": 768, "n_expert": 8, "n_expert_used": 2}
    return PreviewCache(read_model(write_header_only(path, **sizes, n_head_kv=4, n_vocab=4096)))  # type: ignore[arg-type]


def in_mode(mode: str, *, leading: int = 0) -> Layout:
    base = make_layout(4, [CPU_ID] * leading + ["CUDA0"] * (4 - leading))
    return replace(base, split_mode=mode, tensor_split=SHARES)  # type: ignore[arg-type]


def preview_of(tables: PreviewCache, layout: Layout) -> Preview:
    return make_preview(tables, Plan(tables.memory, RIG, Edit(layout, ContextSettings(n_ctx=2048))))


def test_slices_are_rounded_as_the_engine_does(tables: PreviewCache) -> None:
    slices = preview_of(tables, in_mode("tensor")).slices
    assert slices is not None
    assert slices.members == ("CUDA0", "CUDA1")
    assert [each.index for each in slices.layers] == [0, 1, 2, 3]
    for each in slices.layers:
        for bounds in (each.attention, each.experts):
            assert (bounds[0], round(bounds[-1], 9)) == (0.0, 1.0)
            assert list(bounds) == sorted(bounds)
    # 768 columns of the experts are cut at multiples of 256 (blocks of Q4_K): 512 and 256.
    assert [round(each.experts[1], 3) for each in slices.layers] == [0.667, 0.667, 0.667, 0.667]
    # Key heads stay whole, so of 4 a device has 2 or 3; which end gets what is left over rotates.
    assert {round(each.attention[1], 2) for each in slices.layers} <= {0.5, 0.75}


def test_in_mode_row_slices_are_the_shares(tables: PreviewCache) -> None:
    slices = layer_slices(in_mode("row", leading=1), tables.memory.model, None)
    assert slices is not None
    assert [each.index for each in slices.layers] == [1, 2, 3], "CPU layers are not split"
    assert slices.layers[0].attention == (0.0, 2 / 3, 1.0)


def test_other_modes_have_no_slices(tables: PreviewCache) -> None:
    assert preview_of(tables, single_device(4, "CUDA0")).slices is None


def test_slices_are_made_anew_only_for_other_shares(tables: PreviewCache) -> None:
    one = preview_of(tables, in_mode("tensor")).slices
    assert preview_of(tables, in_mode("tensor")).slices is one
    other = replace(in_mode("tensor"), tensor_split=(("CUDA0", 1.0), ("CUDA1", 2.0)))
    assert preview_of(tables, other).slices != one

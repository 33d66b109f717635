"""Patterns of parts, against how the model file sorts its tensors."""

from __future__ import annotations

import re

import pytest

from engine.gguf.blocks import part_of_tensor
from engine.layout.patterns import OVERRIDE_PARTS, OverridePart, find_pattern_fault, part_pattern

STEMS = [
    "attn_q",
    "attn_norm",
    "attn_kv_a_mqa",
    "post_attention_norm",
    "layer_output_norm",
    "ssm_in",
    "time_mix_key",
    "shortconv.conv",
    "indexer.k_norm",
    "ffn_norm",
    "ffn_up",
    "ffn_gate_inp",
    "ffn_up_shexp",
    "ffn_gate_exps",
    "ffn_gate_up_exps",
    "ffn_down_chexps",
    "ffn_up.3",
    "exp_probs_b",
    "post_ffw_norm",
    "channel_mix_key",
    "hc_ffn_base",
    "hc_attn_base",
    "nextn.eh_proj",
    "laurel_l",
]


@pytest.mark.parametrize("part", OVERRIDE_PARTS)
@pytest.mark.parametrize("stem", STEMS)
def test_a_part_finds_exactly_the_tensors_that_count_as_it(part: OverridePart, stem: str) -> None:
    name = f"blk.11.{stem}.weight"
    assert bool(re.search(part_pattern(part, range(7, 12)), name)) == (part in ("all", part_of_tensor(name)))


def test_other_layers_and_other_tensors_are_not_found() -> None:
    found = [name for name in OVERRIDE_PARTS if re.search(part_pattern(name, range(1, 2)), "blk.11.ffn_up.weight")]
    assert found == []
    assert not re.search(part_pattern("all", None), "output.weight")


def test_an_escaped_bracket_before_a_question_mark_is_no_group() -> None:
    assert find_pattern_fault(r"a\(?b") is None
    assert find_pattern_fault(r"a\\(?<n>b)") is not None
    assert find_pattern_fault("[[a]") is None

"""Patterns of parts, compared with the parts into which the model file sorts its tensors."""

from __future__ import annotations

import re

import pytest

from engine.base.values import replace
from engine.model.gguf.model_file import part_of_tensor
from engine.planning.layout.found_names import found_overrides, names_pattern
from engine.planning.layout.layout import Override, make_layout
from engine.planning.layout.patterns import (
    OVERRIDE_PARTS,
    OverridePart,
    find_pattern_error,
    part_pattern,
    pattern_finder,
)

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
    belongs = part in ("all", part_of_tensor(name))
    assert bool(re.search(part_pattern(part, range(7, 12)), name)) == belongs
    assert pattern_finder(part_pattern(part, range(7, 12)))(name) == belongs


def test_other_layers_and_other_tensors_are_not_found() -> None:
    found = [name for name in OVERRIDE_PARTS if re.search(part_pattern(name, range(1, 2)), "blk.11.ffn_up.weight")]
    assert found == []
    assert not re.search(part_pattern("all", None), "output.weight")


def test_an_escaped_bracket_before_a_question_mark_is_no_group() -> None:
    assert find_pattern_error(r"a\(?b") is None
    assert find_pattern_error(r"a\\(?<n>b)") is not None
    assert find_pattern_error("[[a]") is None


LONG_NAME = "blk.0." + "a" * 54 + ".weight"


@pytest.mark.parametrize(
    "pattern", ["(.+)+!", "(a|a)*$", r"(\w|\d|\.)+!", r"^blk\.(.*)*!", r"^blk\.\d+\.(.+)+!", "(.*)*!"]
)
def test_a_pattern_that_backtracks_without_end_is_answered_at_once(pattern: str) -> None:
    assert find_pattern_error(pattern) is None
    assert pattern_finder(pattern)(LONG_NAME) == (pattern == "(a|a)*$")


@pytest.mark.parametrize(
    "pattern",
    [
        "(?=blk)",
        r"blk(?!\.0)",
        r"(.)\1",
        r"\A",
        r"\Qblk",
        r"\p{L}",
        r"\x{62}",
        "(?i)BLK",
        "(?P<n>b)",
        "a**",
        "((a{1000}){1000}){1000}",
        "(" * 1024,
        "\ud800",
    ],
)
def test_what_has_no_promise_of_time_or_another_meaning_elsewhere_is_named(pattern: str) -> None:
    fault = find_pattern_error(pattern)
    assert fault is not None
    assert fault.startswith('the pattern "')
    assert fault.isprintable()
    assert len(fault) < 400
    assert not pattern_finder(pattern)("blk.0.bb.weight")


def test_the_engine_is_told_names_and_finds_the_same() -> None:
    stems = ("ffn_up.weight", "ffn_down_exps.weight", "attn_q.bias")
    names = [f"blk.{layer}.{stem}" for layer in range(12) for stem in stems] + ["output.weight", "token_embd.weight"]
    for pattern in ("(.+)+1", "ffn|output", r"blk\.(1|3)\..*_exps", "token", r"\.1\d?\.", "(.+)+!"):
        layout = replace(make_layout(12, ["CPU"] * 12, "CPU"), overrides=(Override("CPU", pattern=pattern),))
        (told,) = found_overrides(layout, names)
        wanted = [name for name in names if pattern_finder(pattern)(name)]
        assert [name for name in names if re.search(told.pattern, name)] == wanted
        assert not any(letter in told.pattern for letter in "*+?{")


def test_names_that_no_engine_knows_are_not_told() -> None:
    assert names_pattern(["blk.0.a(b)*", "a b", "é", "x" * 200]) == "^no tensor$"
    assert names_pattern(["v.blk.3.a.1.b", "v.blk.4.a.1.b"]) == r"^(v\.blk\.(3|4)(\.a\.1\.b))$"

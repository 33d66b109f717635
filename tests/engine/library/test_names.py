"""Facts from file names."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.library.names import is_wanted, normal, parse_name


@pytest.mark.parametrize(
    ("name", "base", "tag"),
    [
        ("Llama-3.2-1B-Instruct-Q4_K_M.gguf", "Llama-3.2-1B-Instruct", "Q4_K_M"),
        ("gemma-2b.Q8_0.gguf", "gemma-2b", "Q8_0"),
        ("Qwen3-30B-A3B-UD-Q4_K_XL.gguf", "Qwen3-30B-A3B", "UD-Q4_K_XL"),
        ("llama-2-7b.q4_0.gguf", "llama-2-7b", "Q4_0"),
        ("model-IQ2_XXS.gguf", "model", "IQ2_XXS"),
        ("gpt-oss-20b-mxfp4.gguf", "gpt-oss-20b", "MXFP4"),
        ("Phi-4-fp16.gguf", "Phi-4", "F16"),
        ("Mistral-7B-Instruct-v0.3.gguf", "Mistral-7B-Instruct-v0.3", ""),
        ("Q4_K_M.gguf", "", "Q4_K_M"),
    ],
)
def test_a_name_has_a_base_and_a_quantisation(name: str, base: str, tag: str) -> None:
    parsed = parse_name(name)
    assert (parsed.base, parsed.tag, parsed.role) == (base, tag, "model")


def test_a_part_says_which_it_is() -> None:
    parsed = parse_name("big-Q4_K_M-00002-of-00003.gguf")
    assert (parsed.base, parsed.tag, parsed.number, parsed.count) == ("big", "Q4_K_M", 2, 3)


@pytest.mark.parametrize(
    ("name", "role", "base"),
    [
        ("mmproj-gemma-3-4b-it-F16.gguf", "projector", "gemma-3-4b-it"),
        ("gemma-3-4b-it-mmproj-f16.gguf", "projector", "gemma-3-4b-it"),
        ("mmproj-F16.gguf", "projector", ""),
        ("mtp-Qwen3.6-27B-Q8_0.gguf", "draft", "Qwen3.6-27B"),
        ("eagle3-gpt-oss-20b.gguf", "draft", "gpt-oss-20b"),
        ("Llama-3.2-1B.imatrix", "imatrix", "Llama-3.2-1B"),
        ("imatrix_unsloth.gguf", "imatrix", "unsloth"),
        ("SmolVLM-Q8_0.gguf", "model", "SmolVLM"),
    ],
)
def test_what_is_no_model_shows_in_its_name(name: str, role: str, base: str) -> None:
    parsed = parse_name(name)
    assert (parsed.role, parsed.base) == (role, base)


def test_unfinished_downloads_are_no_models() -> None:
    names = ["a.gguf.part", "a.gguf.incomplete", "a.gguf.downloadInProgress", "a.gguf-partial-3", "a.safetensors"]
    assert not any(map(is_wanted, names))
    assert is_wanted("a.GGUF")
    assert is_wanted("a-imatrix.dat")
    assert not is_wanted("training.dat")


def test_comparing() -> None:
    assert normal("Llama_3.2  1B") == normal("llama-3-2-1b")


@given(st.text(max_size=80))
def test_any_name_can_be_taken_apart(name: str) -> None:
    parsed = parse_name(name)
    assert parsed.number >= 0
    assert len(parsed.base) <= len(name)

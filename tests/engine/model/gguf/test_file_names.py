"""What names of weights say, on this disk and on the hub alike."""

from __future__ import annotations

import pytest

from engine.library.hub.addresses import role_of, tag_of
from engine.library.hub.listing import HubFile, make_listing
from engine.library.names import parse_name
from engine.model.gguf.file_names import bits_of, side_role_of, split_tag


@pytest.mark.parametrize(
    ("stem", "tag"),
    [
        ("Model-7B-Q4_K_M", "Q4_K_M"),
        ("Model-7B.q8_0", "Q8_0"),
        ("Model-7B-UD_Q2_K_XL", "UD-Q2_K_XL"),
        ("Model 7B IQ4_XS", "IQ4_XS"),
        ("Model-7B-fp16", "F16"),
        ("gpt-oss-20b-MXFP4_MOE", "MXFP4_MOE"),
        ("Model-7B-TQ1_0", "TQ1_0"),
        ("Model-7B", ""),
    ],
)
def test_disk_and_hub_read_the_same_quantisation(stem: str, tag: str) -> None:
    assert split_tag(stem)[1] == parse_name(f"{stem}.gguf").tag == tag_of(stem) == tag


@pytest.mark.parametrize(
    ("name", "role"),
    [
        ("MMPROJ-F16.gguf", "projector"),
        ("imatrix_unsloth.gguf", "imatrix"),
        ("mtp-Model-Q8_0.gguf", "draft"),
        ("Model-MTP-Q8_0.gguf", None),
        ("Model-Q8_0.gguf", None),
    ],
)
def test_disk_and_hub_agree_on_what_is_no_model(name: str, role: str | None) -> None:
    assert side_role_of(name) == role
    assert parse_name(name).role == role_of(f"folder/{name}") == (role or "model")


def test_bits() -> None:
    assert [bits_of(tag) for tag in ("Q4_K_M", "IQ2_XXS", "BF16", "UD-Q6_K", "")] == [4, 2, 16, 6, 0]


def test_either_spelling_of_a_type_finds_it_on_the_hub() -> None:
    listing = make_listing("a/b", "0" * 40, [HubFile("b-fp16.gguf", 1, "e"), HubFile("b-Q8_0.gguf", 1, "f")])
    assert listing.find("FP16") is listing.find("f16") is listing.find("b-fp16")

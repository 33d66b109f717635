"""Files of a repository grouped into quantisations, with all parts and the matching projector."""

from __future__ import annotations

import pytest

from engine.base.errors import ArgumentError
from engine.library.hub.listing import HubFile, RepoListing, make_listing


def _listing(*paths: str) -> RepoListing:
    return make_listing("org/name", "c" * 40, [HubFile(path, 100 + index, path) for index, path in enumerate(paths)])


def test_parts_are_one_quantisation_in_order() -> None:
    listing = _listing("Q8_0/m-Q8_0-00002-of-00002.gguf", "Q8_0/m-Q8_0-00001-of-00002.gguf", "m-Q4_K_M.gguf")
    assert [(each.tag, [file.name for file in each.files]) for each in listing.quantisations] == [
        ("Q4_K_M", ["m-Q4_K_M.gguf"]),
        ("Q8_0", ["m-Q8_0-00001-of-00002.gguf", "m-Q8_0-00002-of-00002.gguf"]),
    ]
    assert listing.find("q8_0").size_bytes == 201


def test_a_model_with_a_missing_part_is_not_offered() -> None:
    assert _listing("m-00001-of-00003.gguf", "m-00003-of-00003.gguf").quantisations == ()


def test_unsafe_names_are_left_out_and_counted() -> None:
    listing = _listing("../../.bashrc.gguf", "m-Q4_0.gguf", "a\x1b[2J.gguf")
    assert (listing.n_left_out, len(listing.quantisations)) == (2, 1)


def test_the_preferred_one_is_that_of_llama_cpp() -> None:
    assert _listing("m-Q2_K.gguf", "m-Q8_0.gguf", "m-Q4_K_M.gguf").find(None).tag == "Q4_K_M"
    assert _listing("m-Q2_K.gguf", "m-Q8_0.gguf").find(None).tag == "Q8_0"
    assert _listing("m-Q2_K.gguf", "m-Q3_K.gguf").find(None).tag == "Q2_K"


def test_what_is_not_there_is_told_with_what_is() -> None:
    with pytest.raises(ArgumentError, match="Q2_K, Q8_0"):
        _listing("m-Q2_K.gguf", "m-Q8_0.gguf").find("Q5_K_M")
    with pytest.raises(ArgumentError, match="no GGUF model"):
        _listing("README.md").find(None)


def test_the_projector_is_that_of_the_folder_then_the_tag_then_the_bits() -> None:
    listing = _listing("a/m-Q4_0.gguf", "a/mmproj-F16.gguf", "mmproj-Q4_0.gguf", "m-Q8_0.gguf", "mmproj-Q8_0.gguf")

    def projector(tag: str) -> str:
        found = listing.projector_of(listing.find(tag))
        assert found is not None
        return found.path

    assert projector("Q4_0") == "a/mmproj-F16.gguf"
    assert projector("Q8_0") == "mmproj-Q8_0.gguf"
    assert _listing("m-Q4_0.gguf").projector_of(_listing("m-Q4_0.gguf").find(None)) is None

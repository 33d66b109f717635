"""Pasted addresses: repository, quantisation, file, or nothing; never a path outside of a folder."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.base.errors import ArgumentError
from engine.base.texts import escape
from engine.library.hub.addresses import HubAddress, WebAddress, is_safe_path, parse_address, role_of, tag_of


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("org/name", HubAddress("org/name")),
        (" org/name:Q4_K_M ", HubAddress("org/name", quantisation="Q4_K_M")),
        ("hf.co/org/name:Q8_0", HubAddress("org/name", quantisation="Q8_0")),
        ("hf://org/name", HubAddress("org/name")),
        ("https://huggingface.co/org/name", HubAddress("org/name")),
        ("https://hf.co/org/name/tree/v2", HubAddress("org/name", "v2")),
        ("https://huggingface.co/org/name/blob/main/a/b.gguf", HubAddress("org/name", path="a/b.gguf")),
        (
            "https://huggingface.co/org/name/resolve/v2/b.gguf?download=true",
            HubAddress("org/name", "v2", path="b.gguf"),
        ),
        ("https://mirror.example/hub/org/name", HubAddress("org/name")),
        ("https://files.example/m%20x.gguf?key=1", WebAddress("https://files.example/m%20x.gguf?key=1", "m x.gguf")),
        (
            "https://files.example/modèle%20é.gguf?key=ü&b=%C3",
            WebAddress("https://files.example/mod%C3%A8le%20%C3%A9.gguf?key=%C3%BC&b=%C3", "modèle é.gguf"),
        ),
    ],
)
def test_addresses_that_name_something(text: str, address: HubAddress | WebAddress) -> None:
    assert parse_address(text, "https://mirror.example/hub") == address


@pytest.mark.parametrize(
    "text",
    [
        "", "name", "../name", "org/..", "org/na me", "org/name:../x", "http://files.example/m.gguf",
        "https://files.example/m.bin", "https://files.example/..%2Fm.gguf%2F..", "file:///etc/passwd",
        "https://huggingface.co/org/name/resolve/main/../../x.gguf", "https://user:word@files.example/m.gguf",
        "https://huggingface.co/datasets", "org/name\nHost: x", "x" * 5000,
    ],
)  # fmt: skip
def test_addresses_that_name_nothing_say_what_to_write(text: str) -> None:
    with pytest.raises(ArgumentError, match="owner/name"):
        parse_address(text)


@given(st.text(max_size=60))
def test_any_text_is_an_address_or_a_sentence(text: str) -> None:
    found: HubAddress | WebAddress | ArgumentError
    try:
        found = parse_address(text)
    except ArgumentError as error:
        found = error
    assert escape(str(found)) == str(found)


@pytest.mark.parametrize(
    "path",
    [
        "../x.gguf", "a/../../x.gguf", "/etc/x.gguf", "a//x.gguf", "a\\x.gguf", "C:x.gguf", "con.gguf", "a/NUL",
        "x.gguf ", "x.gguf.", "a\nb.gguf", "a\u202egguf.exe", "x" * 300, "/".join("abcdefghij"), ".", "",
    ],
)  # fmt: skip
def test_names_that_leave_their_folder_or_cannot_be_files(path: str) -> None:
    assert not is_safe_path(path)


@pytest.mark.parametrize(
    ("stem", "folder", "tag"),
    [
        ("Model-7B-Q4_K_M", "", "Q4_K_M"),
        ("model.q8_0", "", "Q8_0"),
        ("Model-UD-IQ2_XXS", "", "UD-IQ2_XXS"),
        ("Model", "BF16", "BF16"),
        ("gpt-oss-20b-MXFP4", "", "MXFP4"),
        ("Model-7B", "", ""),
    ],
)
def test_tags(stem: str, folder: str, tag: str) -> None:
    assert tag_of(stem, folder) == tag


def test_roles() -> None:
    assert [role_of(name) for name in ("a.gguf", "x/mmproj-F16.gguf", "imatrix.dat", "mtp-a.gguf", "README.md")] == [
        "model", "projector", "imatrix", "draft", "other",
    ]  # fmt: skip

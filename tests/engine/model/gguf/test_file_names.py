"""Facts from the names of model files, on disk and on the hub."""

from __future__ import annotations

import gzip
from pathlib import Path

import pytest

from engine.library.hub.addresses import role_of, tag_of
from engine.library.hub.listing import HubFile, make_listing
from engine.library.names import parse_name
from engine.model.gguf.file_names import bits_of, display_name, side_role_of, split_tag
from engine.model.gguf.reader import read_model
from tests.support.headers import write_with_hole
from tests.support.real_model import real_model
from tests.zoo.pack import FOLDER


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


@pytest.mark.parametrize(
    ("file", "told", "shown"),
    [
        # Labels of training runs, as converters found them in config.json or as the folder's name.
        ("SmolLM2-135M-Instruct.Q4_1.gguf", "Smollm2 135M 8k Lc100K Mix1 Ep2", "SmolLM2 135M Instruct"),
        ("SmolLM2-1.7B-Instruct-Q4_K_M.gguf", "Smollm2 1.7B 8k Mix7 Ep2 v2", "SmolLM2 1.7B Instruct"),
        ("tiny_chat-Q8_0-00001-of-00002.gguf", "Checkpoint 1200", "tiny chat"),
        ("Chat-7B.gguf", "chat_7b_lr_2e-5_bs128", "Chat 7B"),
        # No names at all.
        ("Qwen3-8B-Q4_K_M.gguf", "n/a", "Qwen3 8B"),
        ("Qwen3-8B-Q4_K_M.gguf", "0123456789abcdef0123456789abcdef01234567", "Qwen3 8B"),
        ("Qwen3-8B-Q4_K_M.gguf", "..", "Qwen3 8B"),
        ("Qwen3-8B-Q4_K_M.gguf", None, "Qwen3 8B"),
        ("Qwen3-8B-Q4_K_M.gguf", 7, "Qwen3 8B"),
        # Names, whatever the file is called.
        ("m.gguf", "Meta Llama 3.1 8B Instruct", "Meta Llama 3.1 8B Instruct"),
        ("m.gguf", "mistralai_mistral-7b-instruct-v0.2", "mistralai_mistral-7b-instruct-v0.2"),
        ("m.gguf", "LLaMA v2", "LLaMA v2"),
        ("m.gguf", "Llama 3.1 Tulu 3 8B DPO", "Llama 3.1 Tulu 3 8B DPO"),
        ("m.gguf", "Step 3.5 Flash", "Step 3.5 Flash"),
        ("m.gguf", "Deepseek V2 Lite Chat", "Deepseek V2 Lite Chat"),
        ("m.gguf", "Mixtral 8x7B Instruct v0.1", "Mixtral 8x7B Instruct v0.1"),
        # A file whose name says nothing either.
        ("model.gguf", "Smollm2 135M 8k Lc100K Mix1 Ep2", "Smollm2 135M 8k Lc100K Mix1 Ep2"),
        ("ggml-model-Q4_K_M.gguf", "n/a", "ggml-model-Q4_K_M"),
    ],
)
def test_a_label_of_a_training_run_is_not_shown_as_the_name(file: str, told: object, shown: str) -> None:
    assert display_name(Path("/models") / file, told) == shown


@pytest.mark.parametrize(
    ("kept", "file", "shown"),
    [
        ("qwen3-dense", "Qwen3-0.6B-Q8_0.gguf", "Qwen3 0.6B"),  # general.name is n/a
        ("qwen3-8b", "other.gguf", "qwen3-8b.Q4_K_M"),
    ],
)
def test_names_of_kept_headers(kept: str, file: str, shown: str, tmp_path: Path) -> None:
    header = gzip.decompress((FOLDER / "headers" / f"{kept}.gguf.head.gz").read_bytes())
    assert read_model(write_with_hole(tmp_path / file, header, 1 << 40)).name == shown


def test_the_demo_has_the_name_that_its_authors_use() -> None:
    assert read_model(real_model()).name == "SmolLM2 135M Instruct"

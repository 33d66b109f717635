"""Model stores of several programs (folders, Hugging Face cache, Ollama), filled with small real GGUF files."""

from __future__ import annotations

import json
from hashlib import sha256
from pathlib import Path

from tests.support.gguf_bytes import GgufBytes, Tensor, number_value, text_array, text_value

DIES_OF_SOME_FILES = """
import os
import engine.library.facts as facts
read = facts.read_facts
facts.read_facts = lambda paths: os._exit(3) if "deadly" in paths[0].name else read(paths)
from engine.library.children import main
main()
"""
"""Python code of a library child that reads headers, and exits at a file with "deadly" in its name."""


def model_bytes(
    name: str = "demo",
    *,
    architecture: str = "llama",
    n_embd: int = 32,
    n_layers: int = 2,
    template: str = "",
    tokenizer: str = "gpt2",
    part: tuple[int, int] | None = None,
) -> bytes:
    """Return the bytes of a model file. `part`: (number from 0, count) of a split file."""
    pairs: dict[str | bytes, bytes] = {
        "general.architecture": text_value(architecture),
        "general.name": text_value(name),
        f"{architecture}.block_count": number_value(n_layers),
        f"{architecture}.context_length": number_value(4096),
        f"{architecture}.embedding_length": number_value(n_embd),
        "tokenizer.ggml.model": text_value(tokenizer),
        "tokenizer.ggml.tokens": text_array(["<s>", "a", "b"]),
    }
    if template:
        pairs["tokenizer.chat_template"] = text_value(template)
    if part is not None:
        pairs |= {"split.no": number_value(part[0]), "split.count": number_value(part[1])}
    tensors = [Tensor("token_embd.weight", (n_embd, 3))]
    tensors += [Tensor(f"blk.{index}.attn_k.weight", (n_embd, n_embd)) for index in range(n_layers)]
    return GgufBytes(pairs=pairs, tensors=tensors).build()


def projector_bytes(*, n_embd: int = 32, sound: bool = False) -> bytes:
    """Return the bytes of a projector for models with `n_embd`."""
    kind = "audio" if sound else "vision"
    return GgufBytes(
        pairs={
            "general.architecture": text_value("clip"),
            "general.type": text_value("mmproj"),
            f"clip.has_{kind}_encoder": number_value(1, 7),
            f"clip.{kind}.projection_dim": number_value(n_embd),
        },
        tensors=[Tensor("mm.0.weight", (16, n_embd))],
    ).build()


def adapter_bytes(*, architecture: str = "llama", n_embd: int = 32) -> bytes:
    """Return a LoRA adapter."""
    return GgufBytes(
        pairs={
            "general.architecture": text_value(architecture),
            "general.type": text_value("adapter"),
            "adapter.type": text_value("lora"),
        },
        tensors=[Tensor("blk.1.attn_k.weight.lora_a", (n_embd, 2)), Tensor("blk.1.attn_k.weight.lora_b", (2, n_embd))],
    ).build()


def put(path: Path, content: bytes) -> Path:
    """Write a file and create its folders; return `path`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    return path


def put_in_hub_cache(
    root: Path, repository: str, name: str, content: bytes, *, commit: str = "c0ffee", shared: bool = False
) -> Path:
    """Write a file into a Hugging Face cache; return its path in the snapshot.

    `shared`: the content is in the blob store that all repositories share.
    """
    folder = root / f"models--{repository.replace('/', '--')}"
    digest = sha256(content).hexdigest()
    blob = folder / "blobs" / digest
    if shared:
        (root / ".huggingface-shared-blobs").touch()
        store = put(root / "blobs" / digest[:2] / digest, content)
        blob.parent.mkdir(parents=True, exist_ok=True)
        if not blob.is_symlink():
            blob.symlink_to(store)
    else:
        put(blob, content)
    put(folder / "refs" / "main", commit.encode())
    link = folder / "snapshots" / commit / name
    link.parent.mkdir(parents=True, exist_ok=True)
    link.symlink_to(Path(*[".."] * (len(Path(name).parts) + 1), "blobs", digest))
    return link


def put_in_ollama(root: Path, name: str, layers: dict[str, bytes]) -> dict[str, Path]:
    """Write a model into Ollama's store; return the path of each layer.

    `layers`: content by kind (model, projector, template and others).
    """
    model, _, tag = name.partition(":")
    told, blobs = [], {}
    for kind, content in layers.items():
        digest = sha256(content).hexdigest()
        blobs[kind] = put(root / "blobs" / f"sha256-{digest}", content)
        media_type = f"application/vnd.ollama.image.{kind}"
        told.append({"mediaType": media_type, "digest": f"sha256:{digest}", "size": len(content)})
    manifest = {"schemaVersion": 2, "layers": told}
    path = root / "manifests" / "registry.ollama.ai" / "library" / model / tag
    blobs["manifest"] = put(path, json.dumps(manifest).encode())
    return blobs

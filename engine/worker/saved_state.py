"""What a saved sequence must have in common with the loaded model and its memory."""

from __future__ import annotations

import ctypes
import hashlib

from engine.worker.checkpoints import MOST
from engine.worker.loaded_context import LoadedContext
from engine.worker.sequence_file import KeptCheckpoint, ModelIdentity, SequenceHeader

_TEXT_BYTES = 4096
_CELL_BYTES = 64
"""More than the engine writes about one token beside its keys and values, for each of the memory's parts."""
_SLACK_BYTES = 1 << 20


def model_identity(loaded: LoadedContext) -> ModelIdentity:
    """Return which model is loaded."""
    low, model = loaded.engine.low, loaded.model
    buffer = ctypes.create_string_buffer(_TEXT_BYTES)
    low.llama_model_desc(model, buffer, _TEXT_BYTES)
    description = buffer.value.decode("utf-8", "replace")
    low.llama_model_meta_val_str(model, b"general.architecture", buffer, _TEXT_BYTES)
    architecture = buffer.value.decode("utf-8", "replace")
    digest = hashlib.sha256()
    for index in range(int(low.llama_model_meta_count(model))):
        for read in (low.llama_model_meta_key_by_index, low.llama_model_meta_val_str_by_index):
            read(model, index, buffer, _TEXT_BYTES)
            digest.update(buffer.value + b"\x00")
    return ModelIdentity(
        description=description,
        architecture=architecture,
        n_layer=int(low.llama_model_n_layer(model)),
        n_embd=int(low.llama_model_n_embd(model)),
        n_vocab=loaded.vocabulary_size,
        n_params=int(low.llama_model_n_params(model)),
        size_bytes=int(low.llama_model_size(model)),
        metadata=digest.hexdigest(),
    )


def header_of(
    loaded: LoadedContext, tokens: int, state_bytes: int, digest: str, checkpoints: tuple[KeptCheckpoint, ...] = ()
) -> SequenceHeader:
    """Return the header for a sequence of this context."""
    settings = loaded.settings
    return SequenceHeader(
        model=model_identity(loaded),
        type_k=settings.type_k,
        type_v=settings.type_v,
        swa_full=settings.swa_full,
        streams=1 if settings.kv_unified else loaded.n_sequences,
        flash_attention=loaded.log.facts.flash_attention,
        tokens=tokens,
        state_bytes=state_bytes,
        digest=digest,
        checkpoints=checkpoints,
    )


def refusal(loaded: LoadedContext, header: SequenceHeader) -> str | None:
    """Return why a saved sequence does not suit this context, None if it does."""
    ours = header_of(loaded, header.tokens, header.state_bytes, header.digest)
    if header.model != ours.model:
        return f"It is of another model: {_one_line(header.model.description)}; loaded is {ours.model.description}."
    if (header.type_k, header.type_v) != (ours.type_k, ours.type_v):
        return (
            f"Its cache is {_one_line(header.type_k)} and {_one_line(header.type_v)}, the loaded one {ours.type_k} and "
            f"{ours.type_v}. Load with the same KV types."
        )
    if header.swa_full != ours.swa_full:
        return "It was saved with another setting of swa_full. Load with the same one."
    if header.streams != ours.streams:
        return (
            f"It was saved with {header.streams} sequences kept apart and the loaded model has {ours.streams}. "
            "Load with the same n_seq_max and kv_unified."
        )
    if header.flash_attention != ours.flash_attention:
        return "It was saved with another setting of flash attention. Load with the same one."
    if header.images and (loaded.media is None or not all(map(loaded.media.is_ours, header.images))):
        return "It holds images or sounds that another projector read. Load with the same projector."
    if header.tokens >= loaded.context_tokens:
        return f"It holds {header.tokens} tokens and the context {loaded.context_tokens}. Load with a longer context."
    # an image may take more cells than positions
    cells = loaded.context_tokens if header.images else header.tokens
    largest_bytes = max([header.state_bytes, *(each.size_bytes for each in header.checkpoints)])
    if len(header.checkpoints) > MOST or largest_bytes > _most_bytes(loaded, cells):
        return "It is larger than all of the loaded model's cache."
    return None


def _most_bytes(loaded: LoadedContext, tokens: int) -> int:
    cache_bytes = sum(part.kv_cache_bytes + part.recurrent_bytes for part in loaded.parts())
    return cache_bytes + tokens * _CELL_BYTES + _SLACK_BYTES


def _one_line(text: str) -> str:
    """Quote what a file says about itself."""
    return " ".join("".join(character if character.isprintable() else " " for character in text).split())[:80]

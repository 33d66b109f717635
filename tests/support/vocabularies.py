"""Properties of vocabularies that tests check."""

from __future__ import annotations

import gguf

from engine.model.demo.llama_writer import Vocabulary

_MUTE = (int(gguf.TokenType.CONTROL), int(gguf.TokenType.UNKNOWN))


def control_ids(vocabulary: Vocabulary) -> tuple[int, ...]:
    """Return the ids of tokens that generated text must not contain: control tokens and the unknown token."""
    return tuple(index for index, kind in enumerate(vocabulary.types) if kind in _MUTE)

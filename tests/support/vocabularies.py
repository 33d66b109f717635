"""What tests ask of a vocabulary."""

from __future__ import annotations

import gguf

from engine.model.demo.llama_writer import Vocabulary

_MUTE = (int(gguf.TokenType.CONTROL), int(gguf.TokenType.UNKNOWN))


def control_ids(vocabulary: Vocabulary) -> tuple[int, ...]:
    """Ids that must not appear in generated text: markers and the unknown token."""
    return tuple(index for index, kind in enumerate(vocabulary.types) if kind in _MUTE)

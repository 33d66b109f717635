"""Finds the capabilities of a model in its GGUF header: tools, thinking, images, sound, embeddings.

Tools and thinking are found in the chat template, embeddings by the pooling type.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from engine.base.language import tr
from engine.model.architectures.registry import find_architecture
from engine.model.gguf.model_file import MetadataValue

# In display order.
CAPABILITIES = ("images", "sound", "tools", "thinking", "embeddings")
CAPABILITY_TEXTS = {
    "images": tr("images"),
    "sound": tr("sound"),
    "tools": tr("tools"),
    "thinking": tr("thinking"),
    "embeddings": tr("embeddings"),
}

_TEMPLATE = "tokenizer.chat_template"
_TOOLS = re.compile(r"\btools\b")
_THINKING = re.compile(r"<think>|\[THINK\]|enable_thinking|reasoning_content|<\|channel\|>|<seed:think>")
_NO_POOLING = 0


def capabilities_of(metadata: Mapping[str, MetadataValue], architecture: str) -> tuple[str, ...]:
    """Return the capabilities of the model with this GGUF header: names in `CAPABILITIES`, in display order.

    "images" and "sound" are found only in the header of a projector (keys `clip.has_..._encoder`).
    """
    found = set()
    templates = [value for key, value in metadata.items() if key.startswith(_TEMPLATE) and isinstance(value, str)]
    if any(_TOOLS.search(template) for template in templates):
        found.add("tools")
    if any(_THINKING.search(template) for template in templates):
        found.add("thinking")
    if metadata.get("clip.has_vision_encoder") is True:
        found.add("images")
    if metadata.get("clip.has_audio_encoder") is True:
        found.add("sound")
    if _makes_embeddings(metadata, architecture) and not templates:
        found.add("embeddings")
    return tuple(name for name in CAPABILITIES if name in found)


def _makes_embeddings(metadata: Mapping[str, MetadataValue], architecture: str) -> bool:
    pooling = metadata.get(f"{architecture}.pooling_type")
    if isinstance(pooling, int) and pooling != _NO_POOLING:
        return True
    record = find_architecture(architecture)
    return record is not None and not record.has_cache and pooling is not None

"""Constants of clip.cpp for each type of multimodal projector (`clip.vision.projector_type`)."""

from __future__ import annotations

from collections.abc import Mapping

IMAGE_TOKENS: Mapping[str, tuple[int, int]] = {
    "gemma4uv": (70, 1120),
    "gemma4v": (70, 1120),
    "glm4v": (8, 4096),
    "hunyuanvl": (256, 16384),
    "kimik25": (2, 4096),
    "kimivl": (8, 1024),
    "lfm2": (64, 256),
    "ling3vl": (8, 4096),
    "minimax_m3": (8, 576),
    "muse_glimmer": (1, 4096),
    "pixtral": (8, 1024),
    "qwen2.5o": (8, 4096),
    "qwen2.5vl_merger": (8, 4096),
    "qwen2vl_merger": (8, 4096),
    "qwen3vl_merger": (8, 4096),
    "youtuvl": (1, 62500),
}
"""Smallest and largest number of image tokens by projector type: arguments of clip.cpp's `set_limit_image_tokens`.

Projector types without such limits are not listed. For these, llama.cpp refuses limits on image tokens.
"""
OWN_PIXELS = ("hunyuanvl", "kimik25")
"""Projector types with which limits on image tokens in the settings have no effect, if the file has pixel limits."""

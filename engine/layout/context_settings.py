"""Context settings, which live in `engine.settings`, for those who look for them here."""

from engine.settings.context_settings import (
    AUTO,
    AUTO_CONTEXT,
    FLASH_ATTENTION_MODES,
    KV_TYPES,
    LOAD_MODES,
    OFFLOAD_MIN_BATCH,
    ContextSettings,
    FlashAttention,
    KvType,
    LoadMode,
    OpOffload,
)

__all__ = [
    "AUTO",
    "AUTO_CONTEXT",
    "FLASH_ATTENTION_MODES",
    "KV_TYPES",
    "LOAD_MODES",
    "OFFLOAD_MIN_BATCH",
    "ContextSettings",
    "FlashAttention",
    "KvType",
    "LoadMode",
    "OpOffload",
]

"""The settings that a model begins with when nobody chose any."""

from __future__ import annotations

import msgspec

from engine.architectures.registry import find_architecture
from engine.gguf.model_file import ModelFile
from engine.settings.context_settings import ContextSettings


def trained_length(model: ModelFile) -> int | None:
    """Return how many tokens the model was trained with at most; None where the file does not say."""
    trained = model.hyper_parameter("context_length")
    usable = isinstance(trained, int) and not isinstance(trained, bool) and 0 < trained < 1 << 31
    return trained if usable and isinstance(trained, int) else None


def reads_whole_texts(model: ModelFile) -> bool:
    """Return whether the model looks at a text as a whole, as embedding models do: all of it is one micro batch."""
    architecture = find_architecture(model.architecture)
    if model.hyper_parameter("attention.causal") is False:
        return True
    return architecture is not None and not architecture.has_cache and model.hyper_parameter("pooling_type") is not None


def default_context(model: ModelFile, n_ctx: int | None = None) -> ContextSettings:
    """Return our defaults for a context of `n_ctx` tokens; None: no more than the model was trained for.

    A model that reads whole texts gets batches as long as its context: the engine refuses a text that needs two.
    """
    defaults = ContextSettings()
    trained = trained_length(model)
    if n_ctx is None:
        n_ctx = min(defaults.n_ctx, trained or defaults.n_ctx)
    if not reads_whole_texts(model):
        return msgspec.structs.replace(defaults, n_ctx=n_ctx)
    n_batch = n_ctx or trained or defaults.n_batch
    return msgspec.structs.replace(defaults, n_ctx=n_ctx, n_batch=n_batch, n_ubatch=n_batch)

"""The context of a model's MTP heads: layers at its end that predict the token after the next one.

As in llama.cpp's common/speculative.cpp (`common_speculative_impl_draft_mtp`), the heads have a context of their own
with the type `LLAMA_CONTEXT_TYPE_MTP`. The input of this context is a token and the hidden state that the model
computed for the token before it (`MtpDrafter`).
"""

from __future__ import annotations

from engine.runtime.child.load.loaded_context import LoadedContext
from engine.runtime.child.native.bindings import Bindings
from engine.runtime.child.native.failures import failure
from engine.runtime.protocol.requests import Load

CONTEXT_TYPE = 1
"""`LLAMA_CONTEXT_TYPE_MTP`."""


def wants_mtp(load: Load) -> bool:
    """Return whether a load uses the model's MTP heads to draft tokens."""
    return load.draft is not None and load.draft.kind == "mtp"


def check_engine(engine: Bindings) -> None:
    """Raise `RequestError` if this version of llama.cpp lacks functions that MTP heads need."""
    if not engine.has_nextn:
        raise failure(
            "argument",
            "This version of llama.cpp cannot draft by MTP heads. Choose n-gram drafts, a draft model or none.",
        )


def check_heads(engine: Bindings, model: int, name: str) -> None:
    """Raise `RequestError` if the model has no MTP heads. `name`: name of the model's file, for the error."""
    if not int(engine.low.llama_model_n_layer_nextn(model)):
        raise failure("argument", f"{name} has no MTP heads. Choose n-gram drafts, a draft model or none.")


def keep_hidden(loaded: LoadedContext) -> None:
    """Make a context return hidden states, which MTP heads read.

    The model's main context returns the hidden states of all tokens. The context of the MTP heads returns only those of
    output rows (tokens for which logits were requested).
    """
    loaded.engine.set_nextn(loaded.context, True, loaded.is_mtp)
    loaded.hidden_rows = loaded.n_sequences if loaded.is_mtp else loaded.batch_tokens

"""Logits for diagnosis: two layouts of one model are compared by them."""

from __future__ import annotations

import ctypes
import hashlib
import math

from engine.protocol.messages import LogitDigest, Logits
from engine.worker.diagnosis import decode_failure
from engine.worker.loaded_context import DECODED, LoadedContext
from engine.worker.outcome import EndOfRequest, failure

SHOWN = 8
SAMPLED = 256


def logit_digest(loaded: LoadedContext, request: Logits) -> LogitDigest:
    """Decode the tokens from an empty cache and digest the logits of the last one.

    Raises:
        EndOfRequest: with the `Failure`.
    """
    if not loaded.makes_text:
        raise failure("argument", "This model does not continue text and has no logits to compare.")
    limit = min(loaded.context_tokens, loaded.batch_tokens)
    if not 0 < len(request.tokens) <= limit:
        raise failure("argument", f"Logits need 1 to {limit} tokens, not {len(request.tokens)}.")
    size = loaded.vocabulary_size
    if any(not 0 <= token < size for token in request.tokens):
        raise failure("argument", f"Tokens of this model are 0 to {size - 1}.")
    loaded.clear()
    status = loaded.decode(request.tokens)
    if status != DECODED:
        raise EndOfRequest(decode_failure(status, loaded.log.facts))
    logits = loaded.engine.low.llama_get_logits_ith(loaded.context, -1)
    values = ctypes.cast(logits, ctypes.POINTER(ctypes.c_float * size)).contents
    sha256 = hashlib.sha256(bytes(values)).hexdigest()
    # A message has no word for what is not finite.
    shown = tuple(values[:]) if all(map(math.isfinite, values)) else ()
    loaded.clear()
    return LogitDigest(sha256=sha256, first=shown[:SHOWN], sample=shown[:: max(1, -(-size // SAMPLED))])

"""How likely a chosen token was, and which others there were: by the model's own numbers, before all samplers."""

from __future__ import annotations

from engine.protocol.messages import TokenChoice
from engine.worker.loaded_context import LoadedContext
from engine.worker.text import piece_text

DIGITS = 5


class ChoiceReader:
    """Reads the `most` likeliest tokens beside each chosen one. It costs a look at all logits for each token."""

    def __init__(self, loaded: LoadedContext, most: int) -> None:
        # imported where it is asked for: it takes longer than all that a child imports for an answer
        import numpy

        self._numpy = numpy
        self._loaded = loaded
        self._most = min(most, loaded.vocabulary_size)
        self._texts: dict[int, str] = {}

    def read(self, place: int, token: int) -> TokenChoice:
        """Return the choice of `token` by the logits at a place of the batch that was decoded last."""
        numpy, loaded = self._numpy, self._loaded
        pointer = loaded.engine.low.llama_get_logits_ith(loaded.context, place)
        logits = numpy.ctypeslib.as_array(pointer, (loaded.vocabulary_size,))
        weights = numpy.exp(logits - logits.max())
        total = float(weights.sum(dtype=numpy.float64))
        likeliest = numpy.argpartition(weights, -self._most)[-self._most :]
        ordered = likeliest[numpy.argsort(weights[likeliest])[::-1]]
        return TokenChoice(
            self._text(token),
            round(float(weights[token]) / total, DIGITS),
            tuple((self._text(int(each)), round(float(weights[each]) / total, DIGITS)) for each in ordered),
        )

    def _text(self, token: int) -> str:
        text = self._texts.get(token)
        if text is None:
            text = self._texts[token] = piece_text(self._loaded, token)
        return text

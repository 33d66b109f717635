"""Which compute graph an architecture has: builders by name, and what they look at besides the file."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import msgspec

from engine.architectures.style import Style
from engine.gguf.model_file import ModelFile

Builder = str
"""`MODULE.FUNCTION` of `engine/memory/compute_graph/models`; a module is imported when a model asks for it."""

Scaled = frozenset[Literal["attention", "dense", "experts", "joined", "states"]]
"""Parts of a layer that look for `.scale` tensors beside their weights; `joined`: queries, keys and values in one;
`states`: what recurrent layers read and write."""
MOSTLY_SCALED: Scaled = frozenset({"attention", "joined", "states"})
EXPERTS_SCALED: Scaled = MOSTLY_SCALED | {"experts"}
ALL_SCALED: Scaled = EXPERTS_SCALED | {"dense"}
ATTENTION_SCALED: Scaled = frozenset({"attention", "states"})
NONE_SCALED: Scaled = frozenset()

StyleOfFile = Callable[[ModelFile], Style]
"""What tells the style where that depends on the file."""


class GraphRecord(msgspec.Struct, frozen=True):
    """How the graph of an architecture is built. Fields of the type `Builder` name functions."""

    style: Style | StyleOfFile = Style()
    """How its layers depart from llama's."""

    embed: Builder | None = None
    """What makes the embeddings of the tokens, where they are not just looked up."""

    layer: Builder = "transformer.decoder_layer"
    """What makes a layer."""

    attention: Builder = "transformer.attention"
    """What mixes tokens in a layer."""

    recurrence: Builder | None = None
    """What takes the place of attention in recurrent layers, or stands beside it."""

    before: Builder | None = None
    """What is made of the embeddings before the first layer."""

    behind: Builder | None = None
    """What is made of the last layer's output, on the device of the output."""

    logits: Builder | None = None
    """What is made of the logits."""

    part: Literal["", "enc", "dec"] = ""
    """Part of its layers that the graph is of: those of an encoder or a decoder."""

    every_layer: bool = False
    """Each of its layers counts, however alike they are."""

    one_token: bool = False
    """A batch of one token a sequence has another graph, which may need more."""

    reads_cache: bool = True
    """The graph uses the caches, if there are any."""

    turns_by_frequencies: bool = True
    """It turns by position with the frequencies that the file may have."""

    scaled: Scaled = MOSTLY_SCALED
    """Where it looks for scales."""

    gating: Literal["fused", "bent", "limited"] = "fused"
    """Activations with a gate are one operation, or several: bent, or limited where the file names a limit."""

    odds: Literal["told", "sigmoid", "told_or_sigmoid"] = "told"
    """What makes the odds of experts: a softmax unless the file tells sigmoids, sigmoids whatever it tells, or where it
    tells nothing."""

    n_keeping_largest: int = 0
    """Layers, from the first on, in which only the largest gates open."""

    def style_of(self, model: ModelFile) -> Style:
        """Return the style with what the file decides about it."""
        return self.style if isinstance(self.style, Style) else self.style(model)


LLAMA_GRAPH = GraphRecord()

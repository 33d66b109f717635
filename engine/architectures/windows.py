"""Models whose layers partly attend to a window."""

from __future__ import annotations

from engine.architectures.graph_record import EXPERTS_SCALED, LLAMA_GRAPH, GraphRecord
from engine.architectures.record import NO_SPLIT, Architecture, Records, Window
from engine.architectures.style import Style
from engine.gguf.model_file import ModelFile


def _llama4(model: ModelFile) -> Style:
    unwindowed = model.hyper_parameter("attention.sliding_window") == 0
    return Style(
        rope="but_last" if unwindowed else "but_fourth", normalises=False, weighting="on_input", scales_unturned=True
    )


def _mimo2(model: ModelFile) -> Style:
    scaled = model.hyper_parameter("attention.value_scale") not in (None, 0.0, 1.0)
    return Style(projections="bare", scaled_attention=scaled)


RECORDS: Records = {
    "mimo2": Architecture(window=Window(), graph=GraphRecord(_mimo2, odds="sigmoid")),
    "spark2_5": Architecture(window=Window(), graph=LLAMA_GRAPH),
    "step35": Architecture(window=Window()),
    "mellum": Architecture(window=Window(4, optional=True), graph=GraphRecord(scaled=EXPERTS_SCALED)),
    "plamo3": Architecture(window=Window(8, optional=True), graph=LLAMA_GRAPH),
    "afmoe": Architecture(
        window=Window(4, optional=True),
        graph=GraphRecord(
            Style(input_scale=True, normalises=None, rope="but_fourth", late_rows="after_post_norm"),
            odds="told_or_sigmoid",
        ),
    ),
    "exaone-moe": Architecture(window=Window(4), graph=GraphRecord(Style(normalises=None, rope="sliding"))),
    "exaone4": Architecture(
        window=Window(4, n_tokens=4096, only_with_layers=64), graph=GraphRecord(Style(rope="sliding"))
    ),
    "gpt-oss": Architecture(
        window=Window(2),
        graph=GraphRecord(Style(normalises=False, weighting="after_choice", late_rows="before_norm", post_norm=False)),
    ),
    "laguna": Architecture(
        window=Window(4, full_first=True, optional=True),
        graph=GraphRecord(Style(normalises=None), odds="told_or_sigmoid"),
    ),
    "llama4": Architecture(window=Window(4, n_tokens=8192, fixed=True, none_if_zero=True), graph=GraphRecord(_llama4)),
    "maple": Architecture(window=Window(), graph=GraphRecord(Style(rope="sliding"))),
    "muse-glimmer": Architecture(
        window=Window(4), graph=GraphRecord(Style(input_scale=True, rope="sliding", late_rows="after_post_norm"))
    ),
    "olmo2": Architecture(window=Window(4, optional=True), split=NO_SPLIT, graph=GraphRecord(Style(qk_norm="flat"))),
    "smallthinker": Architecture(
        window=Window(4, full_first=True, n_tokens=4096, fixed=True, optional=True),
        graph=GraphRecord(Style(early_router=True, rope="but_first_of_four")),
    ),
}

"""Models with delta attention beside latent attention (KDA)."""

from __future__ import annotations

from engine.architectures.graph_record import ATTENTION_SCALED, NONE_SCALED, GraphRecord
from engine.architectures.record import NO_SPLIT, Architecture, Records, Recurrence
from engine.architectures.style import Style

_KDA = Recurrence("no_kv_heads", "kda")

RECORDS: Records = {
    "kimi-linear": Architecture(
        latent=True,
        recurrence=_KDA,
        also_as_one=True,
        split=NO_SPLIT,
        graph=GraphRecord(
            Style(rope="none"),
            attention="mla.latent_attention",
            recurrence="delta_net.early_delta_attention",
            scaled=ATTENTION_SCALED,
        ),
    ),
    "kimi-k3": Architecture(
        latent=True,
        recurrence=_KDA,
        latent_values=True,
        split=NO_SPLIT,
        graph=GraphRecord(
            Style(rope="none", normalises=None, late_rows="never"),
            layer="residual_streams.residual_mixing_layer",
            attention="mla.latent_attention",
            recurrence="delta_net.delta_attention",
            behind="residual_streams.mixed_rows",
            scaled=NONE_SCALED,
            gating="bent",
        ),
    ),
}

"""Values that are shown and emitted by the settings bar and by the dialogs for settings and automatic layouts."""

from __future__ import annotations

from msgspec import Struct

from engine.planning.layout.layout import SplitMode
from engine.planning.settings.context_settings import KvType


class SplitModeChoice(Struct, frozen=True):
    """The split mode that a user chose."""

    mode: SplitMode


class AdapterName(Struct, frozen=True):
    """A LoRA adapter: path of its file, and its scale. The settings file stores this value."""

    path: str
    scale: float


class DraftChoice(Struct, frozen=True):
    """The settings of speculative decoding as the form shows them.

    kind: source of the drafted tokens: "none", "ngram", "model" or "mtp".
    path: path of the draft model; empty for the other kinds.
    n_tokens: number of tokens that are drafted for each step.
    device: device of the draft model, or several with commas; None if it is decided automatically.
    """

    kind: str = "none"
    path: str = ""
    n_tokens: int = 4
    device: str | None = None


class ProposedDraft(Struct, frozen=True):
    """A model of the library that can be chosen as draft model. `name`: its name and size as text."""

    path: str
    name: str


class SideFileNames(Struct, frozen=True):
    """Files that are loaded with the model.

    projector: path of the projector; empty if there is none.
    device: device of the projector; None if it is decided automatically.
    proposed_drafts: models of the library that can be chosen as draft model, the smallest first.
    has_mtp: whether the model has an MTP head that can draft.
    """

    projector: str = ""
    device: str | None = None
    adapters: tuple[AdapterName, ...] = ()
    draft: DraftChoice = DraftChoice()
    proposed_drafts: tuple[ProposedDraft, ...] = ()
    has_mtp: bool = False


class AutoOptions(Struct, frozen=True):
    """Options of automatic layouts. The settings file stores this value.

    strategy: name in `STRATEGIES`.
    order: device ids, the preferred one first.
    off: ids of devices that must not be used.
    kv_types: cache types that the strategy for the longest context may choose, the preferred one first. If there are
    none, the cache types of the settings are used.
    split: whether to use several devices even if one is enough.
    one_backend: whether to use devices of one backend only.
    """

    strategy: str = "fewest"
    order: tuple[str, ...] = ()
    off: frozenset[str] = frozenset()
    kv_types: tuple[KvType, ...] = ()
    split: bool = False
    one_backend: bool = False

    def ordered(self, ids: tuple[str, ...]) -> tuple[str, ...]:
        """Return `ids` in the preferred order; ids that `order` does not contain come last."""
        asked = [device_id for device_id in dict.fromkeys(self.order) if device_id in ids]
        return (*asked, *(device_id for device_id in ids if device_id not in asked))


class StrategyText(Struct, frozen=True):
    """Texts of a strategy (a function that finds an automatic layout): name in the code, title, and purpose.

    uses_order: whether the strategy depends on the order of the devices.
    uses_kv_types: whether the strategy may choose cache types.
    """

    name: str
    title: str
    purpose: str
    uses_order: bool = False
    uses_kv_types: bool = False


CONTROL_HEIGHT_PX = 30

"""Values of the controls: what the settings bar, the settings of a load and automatic layouts show and report."""

from __future__ import annotations

from dataclasses import dataclass

from engine.planning.layout.layout import SplitMode
from engine.planning.settings.context_settings import KvType


@dataclass(frozen=True, slots=True)
class SplitModeChoice:
    """The person wants this split mode."""

    mode: SplitMode


@dataclass(frozen=True, slots=True)
class AdapterName:
    """A LoRA adapter as it is shown: its file, and what it counts."""

    path: str
    scale: float


@dataclass(frozen=True, slots=True)
class SideFileNames:
    """What is loaded beside the model: `projector` empty for none, `device` None where that is left open."""

    projector: str = ""
    device: str | None = None
    adapters: tuple[AdapterName, ...] = ()


@dataclass(frozen=True, slots=True)
class AutoWishes:
    """`order`: device ids, the preferred first; `off`: ids that are not to be used; `kv_types`: cache types that the
    longest context may use, the preferred first (none: those of the settings); `split`: use several devices even where
    one is enough."""

    strategy: str = "fewest"
    order: tuple[str, ...] = ()
    off: frozenset[str] = frozenset()
    kv_types: tuple[KvType, ...] = ()
    split: bool = False

    def ordered(self, ids: tuple[str, ...]) -> tuple[str, ...]:
        """Return `ids` in the preferred order, those that it leaves out behind."""
        asked = [device_id for device_id in dict.fromkeys(self.order) if device_id in ids]
        return (*asked, *(device_id for device_id in ids if device_id not in asked))


@dataclass(frozen=True, slots=True)
class StrategyWords:
    """A strategy's name, what people call it, and what it is for."""

    name: str
    title: str
    purpose: str
    uses_order: bool = False
    uses_kv_types: bool = False


CONTROL_HEIGHT_PX = 30

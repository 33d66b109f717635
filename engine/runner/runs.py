"""What the runner keeps about loads and generations that have begun and not ended."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum, auto

from engine.layout.context_settings import ContextSettings
from engine.runner.events import LoadEnding
from engine.runner.load_order import LoadOrder
from engine.runner.protocol import Load
from engine.runner.reports import StageTracker


class RunnerState(Enum):
    """What the child of a runner does."""

    STOPPED = auto()
    STARTING = auto()
    LOADING = auto()
    READY = auto()
    GENERATING = auto()
    STOPPING = auto()
    FAILED = auto()


@dataclass(frozen=True, slots=True)
class LoadedInfo:
    """What a chat needs to know about the loaded model. `flash_attention` None: the engine did not tell."""

    order: LoadOrder
    n_ctx: int
    n_vocab: int
    chat_template: bool
    flash_attention: bool | None
    layer_devices: tuple[str, ...]
    kv_devices: tuple[tuple[int, str], ...]
    context: ContextSettings


class LoadPhase(Enum):
    """CHECKING: rules and endpoints. REPLACING: the model loaded before is ending. RUNNING: in a child of its own."""

    CHECKING = auto()
    REPLACING = auto()
    RUNNING = auto()


@dataclass(eq=False, slots=True)
class LoadRun:
    """`unchecked` are endpoints that the model loaded before still holds; `ending` is kept until the child is gone."""

    order: LoadOrder
    tracker: StageTracker = field(default_factory=StageTracker)
    phase: LoadPhase = LoadPhase.CHECKING
    request: Load | None = None
    unchecked: tuple[str, ...] = ()
    ending: LoadEnding | None = None
    cancelled: bool = False


@dataclass(eq=False, slots=True)
class GenerationRun:
    """`sent`: the child has been asked; `killed`: it did not stop in time and is being ended."""

    sent: bool = False
    stopping: bool = False
    killed: bool = False


@dataclass(eq=False, slots=True)
class WaitingLoad:
    """A load that begins when what runs now has ended."""

    order: LoadOrder
    cancelled: bool = False

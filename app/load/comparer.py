"""Comparisons of the speed of layouts, run in the background: one at a time, with progress as a signal."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from msgspec import Struct
from PySide6.QtCore import QObject, Signal

from app.background import Background, Task
from app.models.open_models import OpenModels
from app.models.speeds import SpeedRepository
from app.models.unloader import Unloader
from app.notices import Notices
from engine.base.errors import ArgumentError, EngineError
from engine.base.language import tr
from engine.machines.bench.candidates import Candidate
from engine.machines.bench.results import PRESETS, BenchResults, read_results, write_results
from engine.machines.bench.run import BenchRequest, run_benchmark
from engine.machines.bench.runner import BenchProgress
from engine.model.gguf.model_file import ModelFile
from engine.planning.fit.speed_book import SpeedBook
from engine.planning.layout.layout_file import read_layout
from engine.planning.memory.side_files import NO_SIDE_FILES
from engine.planning.plan.edit import Edit, edit_of_file
from engine.planning.plan.plan import Plan
from engine.runtime.session.status import Phase

_END_S = 12.0
"""Seconds that the closing window waits for the child of a comparison, which has 10 seconds to exit."""


class NamedEdit(Struct, frozen=True):
    """An edit (layout and settings) to compare, and its name for people."""

    name: str
    edit: Edit


class LayoutComparer(QObject):
    """Compares the speeds of layouts by measuring them in a child process, and emits progress and results.

    Measured speeds are stored in the repository `speeds`.
    """

    progressed = Signal(BenchProgress)
    finished = Signal(BenchResults)
    failed = Signal(str)

    def __init__(
        self,
        models: OpenModels,
        speeds: SpeedRepository,
        unloader: Unloader,
        background: Background,
        notices: Notices,
        parent: QObject | None = None,
    ) -> None:
        super().__init__(parent)
        self._models = models
        self._unloader = unloader
        self._speeds = speeds
        self._background = background
        self._notices = notices
        self._comparing = background.latest()

    @property
    def is_running(self) -> bool:
        return self._comparing.is_running

    @property
    def obstacle(self) -> str:
        """The reason why no comparison can start now, as a sentence for people; empty if one can."""
        if self._models.held:
            return tr(
                "A loaded model takes memory and computing time. Unload the model first (Model > Unload), then compare."
            )
        return ""

    @property
    def can_park(self) -> bool:
        """Whether there are loaded models, and all are idle, so that `park_all` may unload them."""
        held = [model for model in self._models.all if model.held is not None]
        return bool(held) and all(model.loading.phase is Phase.READY for model in held)

    def park_all(self, then: Callable[[], None]) -> None:
        """Park all loaded models: unload them until their next question.

        `then` is called when their processes have ended.
        """
        for model in self._models.all:
            if model.held is not None:
                self._unloader.park(model)
        self._unloader.when_gone(self._models.all, then)

    def start(self, plan: Plan, edits: tuple[NamedEdit, ...], preset: str, *, automatic: bool) -> None:
        """Compare the speeds of the layouts in `edits`, for the model and rig of `plan`.

        If a comparison runs already, nothing is started.

        `progressed` and then `finished` or `failed` are emitted.
        `preset`: key in `PRESETS`; it sets how much is measured.
        `automatic`: whether automatic layouts, and other settings of the fastest layout, are compared too.
        """
        if self.is_running:
            return
        book = self._speeds.book
        # Tables of its own: those of `plan` belong to the GUI thread.
        own = plan.with_own_tables()

        def work(task: Task[BenchProgress]) -> tuple[BenchResults, SpeedBook]:
            candidates = tuple(Candidate(each.name, own.with_edit(each.edit)) for each in edits)
            for each in candidates:
                _check(each)
            return run_benchmark(BenchRequest(candidates, PRESETS[preset], automatic), book, task.token, task.report)

        def show(found: tuple[BenchResults, SpeedBook]) -> None:
            results, learnt = found
            self._speeds.learn_answers(book, learnt)
            self.finished.emit(results)

        def fail(error: EngineError) -> None:
            self.failed.emit(error.summary())

        self._comparing.run(tr("Comparing speeds"), work, show, fail, self.progressed.emit)

    def cancel(self) -> None:
        """Cancel the running comparison; `finished` is emitted with the results until then."""
        self._comparing.stop()

    def read_layout(self, path: Path, model: ModelFile, add: Callable[[str, Edit], None]) -> None:
        """Read the layout file `path` in the background, then call `add` with a name and an edit for `model`.

        The edit has the layout, the settings and the draft of the file, but no projector and no adapters.
        """
        self._background.run(
            tr("Reading {name}", name=path.name),
            lambda: edit_of_file(read_layout(path, n_layers=model.n_layers), model, path.parent, NO_SIDE_FILES),
            lambda edit: add(path.stem, edit),
            self._notices.show_error,
        )

    def save(self, path: Path, results: BenchResults) -> None:
        """Write the results of a comparison to the file `path` in the background."""
        self._background.run(
            tr("Writing {name}", name=path.name),
            lambda: write_results(path, results),
            lambda _: self._notices.show(tr("Saved {name}", name=path.name)),
            self._notices.show_error,
        )

    def open(self, path: Path) -> None:
        """Read results of a comparison from the file `path` in the background; `finished` or `failed` is emitted."""
        self._background.run(
            tr("Reading {name}", name=path.name),
            lambda: read_results(path),
            self.finished.emit,
            lambda error: self.failed.emit(error.summary()),
        )

    def close(self) -> None:
        """Cancel the running comparison, and wait a bounded time for the exit of its child."""
        self._comparing.close(_END_S)


def _check(candidate: Candidate) -> None:
    for found in candidate.plan.violations:
        raise ArgumentError(tr("{name} cannot be loaded: {message}", name=candidate.name, message=found.message))

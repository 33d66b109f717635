"""Measured speeds of devices and layouts, which the speed of each later answer corrects."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path

from PySide6.QtCore import QObject, Signal

from app.background import Background, Worker
from app.models.document import LayoutDocument
from app.models.open_model import OpenModel
from app.models.open_models import OpenModels
from app.notices import Notices
from app.paths import speeds_path
from app.rig.live_rig import LiveRig
from engine.base.errors import EngineError
from engine.base.language import tr
from engine.base.values import replace
from engine.devices.device import Rig
from engine.machines.bench.thread_counts import with_threads
from engine.machines.rigs.speeds import (
    BareSpeeds,
    bare_speed,
    card_links,
    known_speeds,
    learnt,
    measured_book,
    speed_lines,
    timed_answer,
)
from engine.planning.fit.speed_book import SpeedBook, change_speed_book, read_speed_book, speed_key
from engine.planning.memory.model_memory import ModelMemory
from engine.planning.plan.edit import Edit
from engine.planning.plan.plan import Plan
from engine.planning.speed.answers import MIN_PROMPT_TOKENS, MIN_TOKENS
from engine.planning.speed.prediction import LastAnswer
from engine.planning.speed.speeds import NO_MEASUREMENTS, Speeds
from engine.runtime.session.events import Done

_log = logging.getLogger("layerdeck.speeds")
_KEPT_ANSWERS = 256
"""Largest number of answers whose measured speed is stored."""


class SpeedRepository(QObject):
    """Stores measured speeds of all models in a file, which a background thread writes.

    `LayoutDocument` predicts tokens per second from these speeds. Use a repository in the GUI thread only, except
    `known_speeds` and `answered_per_second`.
    """

    known_changed = Signal(object)  # Speeds
    """Carries the known speeds of the rig's devices after a change."""
    compared = Signal()
    """Emitted after the speed of an answer was compared with its prediction."""

    def __init__(
        self,
        live: LiveRig,
        models: OpenModels,
        document: LayoutDocument,
        background: Background,
        notices: Notices,
        parent: QObject | None = None,
    ) -> None:
        super().__init__(parent)
        self._live = live
        self._models = models
        self._document = document
        self._background = background
        self._notices = notices
        self._writer = Worker("speeds")
        self._path = speeds_path()
        self.book = read_speed_book(self._path)
        self._answered: dict[tuple[Path, Edit], LastAnswer] = {}
        self._devices: tuple[tuple[str, str], ...] = ()
        self._card_links: Mapping[str, float] = {}
        self._speeds = NO_MEASUREMENTS
        live.set_speed_book(self.book)
        live.rig_changed.connect(self._on_rig_changed)
        self._on_rig_changed(live.rig)

    def follow(self, model: OpenModel) -> None:
        """From now on, correct the known speeds of devices by the measured speed of each answer of `model`."""
        model.conversation.answer_finished.connect(lambda event: self._on_answer(model, event))

    def known_speeds(self, rig: Rig) -> Speeds:
        """Return the known speeds of the devices of `rig`.

        The call queries device drivers, which takes time: not for the GUI thread.
        """
        return known_speeds(rig, self.book)

    def answered_per_second(self, path: Path, edit: Edit) -> float | None:
        """Return the tokens per second of the last answer with layout and settings `edit`; None if there was none.

        May be called in any thread. `path`: path of the model's first file.
        """
        answer = self._answered.get((path, edit))
        return None if answer is None else answer.tokens_per_second

    def measure(self) -> None:
        """Measure the speeds of the rig's devices in the background, and show the results on the status line."""
        rig, book = self._live.rig, self.book
        held = [endpoint for model in self._models.held for endpoint in model.endpoints]

        def measure() -> tuple[SpeedBook, tuple[str, ...]]:
            found, problems = measured_book(rig, book, held)
            found, threads = with_threads(found, rig.host)
            return found, (*problems, *threads)

        def show(measured: tuple[SpeedBook, tuple[str, ...]]) -> None:
            # Answers may have changed the book meanwhile.
            self._keep(self.book.with_changes(book, measured[0]))
            self._notices.show(" ".join((*speed_lines(rig, self.book), *measured[1])))

        self._background.run(tr("Measuring speeds"), measure, show, self._notices.show_error)

    def learn(self, book: SpeedBook) -> None:
        """Store the device speeds of `book`, as measured by Help > Check This Computer.

        Stored speeds of answers stay, except those on devices whose speed has changed.
        """
        self._keep(self.book.with_changes(self.book, replace(self.book, devices=book.devices)))

    def learn_answers(self, before: SpeedBook, after: SpeedBook) -> None:
        """Store the speeds of answers that a comparison of layouts has measured.

        `before`, `after`: the speeds before and after the comparison. Only their differences are stored: answers in the
        window may also have changed the stored speeds meanwhile.
        """
        self._keep(self.book.with_changes(before, after))
        self.compared.emit()

    def _on_answer(self, model: OpenModel, event: Done) -> None:
        file, loaded, rig = model.file, model.loading.loaded, self._live.rig
        if file is None or loaded is None:
            return
        used = {*loaded.edit.layout.devices, *(override.device for override in loaded.edit.layout.overrides)}
        # The rig may have changed since the load, so that there is nothing to compare with.
        if not used <= set(rig.ids):
            return  # The devices are not those of the load any more.

        self._remember((file.paths[0], loaded.edit), event)
        if event.draft is not None:
            # What a draft gains belongs to this text, not to the speed of the devices.
            self.compared.emit()
            return
        book = self.book
        answer = timed_answer(event)

        def predict() -> tuple[Plan, BareSpeeds | None]:
            plan = Plan(ModelMemory(file), rig, loaded.edit)
            return plan, bare_speed(plan, book, answer)

        def learn(found: tuple[Plan, BareSpeeds | None]) -> None:
            plan, predicted = found
            if predicted is not None:
                self._keep(learnt(self.book, plan, predicted, answer))
            self.compared.emit()

        # In the background: the prediction of a large model takes a moment.
        self._background.run("Comparing speeds", predict, learn, _log_error, quiet=True)

    def _remember(self, what: tuple[Path, Edit], event: Done) -> None:
        if event.generated_tokens >= MIN_TOKENS:
            # Inserted again at the end: the oldest entries are dropped.
            self._answered.pop(what, None)
            # The context grows by one token at each step: this is its mean fill while the answer was generated.
            fill_tokens = event.prompt_tokens + event.generated_tokens // 2
            read_tokens = event.prompt_tokens - event.cached_tokens
            has_prompt_speed = read_tokens >= MIN_PROMPT_TOKENS and what[1].side_files.projector is None
            self._answered[what] = LastAnswer(
                event.generation_tokens_per_second,
                fill_tokens,
                read_tokens if has_prompt_speed else 0,
                event.prompt_tokens_per_second if has_prompt_speed else 0.0,
            )
            self._answered = dict(list(self._answered.items())[-_KEPT_ANSWERS:])
            self._show()

    def _on_rig_changed(self, rig: Rig) -> None:
        """Read the speeds of the devices' PCIe links if the rig has other devices than before.

        Most changes of the rig concern only free memory; then nothing is done.
        """
        devices = tuple((device.id, speed_key(device)) for device in rig.all_devices)
        if devices == self._devices:
            return
        self._devices, self._card_links = devices, {}
        self._show()
        # In the background: drivers and sysfs are asked for the links of cards.
        if any(not device.is_rpc for device in rig.devices):
            self._background.run("Reading links", lambda: card_links(rig), self._take_links, _log_error, quiet=True)

    def _take_links(self, links: Mapping[str, float]) -> None:
        self._card_links = links
        self._show()

    def _show(self) -> None:
        """Pass the known speeds to the layout document, which predicts with them, and emit `known_changed`."""
        self._speeds = self.book.speeds(self._live.rig, self._card_links)
        self._document.set_speeds(self._speeds, self._answered)
        self.known_changed.emit(self._speeds)

    @property
    def speeds(self) -> Speeds:
        """The known speeds of the rig's devices and of their links."""
        return self._speeds

    def _keep(self, book: SpeedBook) -> None:
        if book == self.book:
            return
        before, self.book = self.book, book
        self._live.set_speed_book(book)
        self._show()
        path = self._path
        self._background.run(
            "Keeping speeds",
            # Read again: a command may have written to the file meanwhile.
            lambda: change_speed_book(path, lambda stored: stored.with_changes(before, book)),
            _nothing,
            _log_error,
            quiet=True,
            worker=self._writer,
        )


def _log_error(error: EngineError) -> None:
    _log.info("speeds: %s", error.summary())


def _nothing(_result: None) -> None:
    """Callback without effect, called when the file is written."""

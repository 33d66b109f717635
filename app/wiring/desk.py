"""Construction of the desk: all objects of the window except its widgets, and the connections between them."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from msgspec import Struct
from PySide6.QtCore import QObject

from app.background import Background, Worker
from app.chats.archive import ChatArchive
from app.chats.chat_controller import ChatController
from app.chats.preset_store import PresetStore
from app.chats.saved_kv_states import KvStateRepository, ModelKvStates
from app.library.catalogue import LibraryCatalogue
from app.library.downloads import DownloadController
from app.library.finder import HubFinder
from app.library.hub_access import HubAccess
from app.library.last_layouts import LastLayouts
from app.library.library import Library
from app.library.planner import ForecastPlanner
from app.load.comparer import LayoutComparer
from app.load.loader import Loader
from app.load.prober import Prober
from app.load.several import SeveralModels
from app.load.unload_offers import UnloadOffers
from app.models.auto_layouts import AutoLayouts
from app.models.document import LayoutDocument
from app.models.held_memory import HeldMemory
from app.models.layouts import Layouts
from app.models.loading import Loading
from app.models.open_model import OpenModel
from app.models.open_models import OpenModels
from app.models.opener import ModelOpener
from app.models.other_layouts import OtherLayouts
from app.models.replanner import Replanner
from app.models.side_files import SideFileController
from app.models.speeds import SpeedRepository
from app.models.unloader import Unloader
from app.notices import Notices
from app.paths import chats_path, library_path, presets_path, saved_states_path
from app.rig.calibrator import Calibrator
from app.rig.examiner import Examiner
from app.rig.sampling import HeadroomMonitor
from app.serving.api_server import WindowApiServer
from app.settings import Settings
from app.wiring.rig import RigObjects, make_rig
from engine.runtime.media.images.formula import FormulaProcess
from engine.runtime.probing.vocabulary import VocabularyCounter
from engine.runtime.session.status import Phase
from widgets.markdown.formulas import Formula, FormulaKey
from widgets.markdown.typesetter import Typesetter

if TYPE_CHECKING:
    from app.serving.offers import Offers
    from app.serving.served_models import ServedModels


class Desk(Struct, frozen=True):
    """All objects of the window except widgets. No method blocks the GUI thread; results arrive as signals."""

    settings: Settings
    background: Background
    notices: Notices
    rig: RigObjects
    document: LayoutDocument
    models: OpenModels
    calibrator: Calibrator
    loader: Loader
    prober: Prober
    headroom_monitor: HeadroomMonitor
    held_memory: HeldMemory
    opener: ModelOpener
    layouts: Layouts
    last_layouts: LastLayouts
    auto_layouts: AutoLayouts
    side_files: SideFileController
    speeds: SpeedRepository
    unloader: Unloader
    unload_offers: UnloadOffers
    several: SeveralModels
    other_layouts: OtherLayouts
    library: Library
    examiner: Examiner
    comparer: LayoutComparer
    finder: HubFinder
    archive: ChatArchive
    chat_controller: ChatController
    server: WindowApiServer
    states: KvStateRepository
    presets: PresetStore
    typesetter: Typesetter
    formulas: FormulaProcess
    vocabulary: VocabularyCounter

    @property
    def loading(self) -> Loading:
        """The session of the current model: its loads, its state and its requests."""
        return self.models.current.loading

    @property
    def is_edited(self) -> bool:
        """Whether the edited layout or settings of the current model differ from the loaded ones."""
        return self.models.current.status.is_edited

    def close(self) -> None:
        """End all child processes and threads within a bounded time. Called once, when the window closes."""
        # First: results that arrive from now on are dropped, so that none reaches an object that is closed below.
        self.background.close()
        self.formulas.close()
        # Before the models, so that programs get the ending of their answers, and load no other model.
        self.server.close()
        self.vocabulary.close()
        self.library.close()
        self.examiner.close()
        self.comparer.close()
        self.finder.close()
        # Before the models: memory that they give back would start a probe.
        self.prober.close()
        self.unload_offers.close()
        self.several.cancel()
        self.loader.close()
        # Before the rig: models on lab workers may still save their KV states.
        self.models.close()
        self.rig.close()
        self.settings.sync()
        self.archive.close()  # Last: it may copy the whole database, for some seconds at most.


def make_desk(
    settings: Settings, parent: QObject | None = None, *, clock: Callable[[], float] = time.monotonic
) -> Desk:
    """Return a desk (all objects without widgets) with one open model that has no file, and without devices.

    `clock`: source of the current time in seconds, which tests replace.
    """
    background, notices = Background(parent), Notices(parent)
    document = LayoutDocument(background, parent)
    rig = make_rig(background, notices, settings, parent)
    live = rig.live
    calibrator = Calibrator(live, background, parent=parent)
    models = OpenModels(calibrator, clock=clock, keep_alive_s=settings.idle_time_s, parent=parent)
    # First among the slots of the document: the others read the status of the edited model.
    document.preview_changed.connect(lambda: models.current.show_edit(document.edit))
    headroom_monitor = HeadroomMonitor(live, parent)
    # First among the slots of the models: the loader reads free memory, which this object updates.
    held_memory = HeldMemory(models, live, headroom_monitor, parent)
    speeds = SpeedRepository(live, models, document, background, notices, parent)
    auto_layouts = AutoLayouts(document, live, background, settings, speeds, notices, parent)
    loader = Loader(models, document, live, rig.lab, settings, background, auto_layouts.constraints, parent)
    examiner = Examiner(live, rig.search, partial(_held_endpoints, models), background, notices, parent)
    # The examination writes these files itself. Both objects hold older values, which their next write would put back.
    examiner.learnt.connect(lambda learnt: calibrator.learn(learnt.calibration))
    examiner.learnt.connect(lambda learnt: speeds.learn(learnt.speeds))
    access = HubAccess(settings, notices)
    opener = ModelOpener(models, document, live, rig.lab, settings, background, notices, speeds, parent)
    unloader = Unloader(models, opener, rig.lab, settings, notices, parent)
    library = Library(LibraryCatalogue(library_path()), lambda: models.current, background, notices, parent)
    # Not a field of the desk: its parent, the library, keeps it alive, and signals do the rest.
    ForecastPlanner(library, models=models, live=live, auto_layouts=auto_layouts, speeds=speeds)
    archive = ChatArchive(chats_path(), background, notices, parent)
    formulas = FormulaProcess()

    def make_served() -> tuple[Offers, ServedModels]:
        # Imported here: the window opens without the server.
        from app.serving.offers import Offers
        from app.serving.served_models import ServedModels

        offers = Offers(library.catalogue)
        return offers, ServedModels(
            models,
            opener,
            loader,
            document,
            auto_layouts,
            settings,
            live,
            offers,
            background,
            notices,
            parent,
        )

    layouts = Layouts(document, models, live, background, notices, speeds, parent)
    # As the parked models: signals do all of it.
    Replanner(document, models, live, layouts, opener, settings, parent or models)
    desk = Desk(
        settings=settings,
        background=background,
        notices=notices,
        rig=rig,
        document=document,
        models=models,
        calibrator=calibrator,
        loader=loader,
        prober=Prober(document, background, lambda: held_memory.may_probe(document), parent),
        headroom_monitor=headroom_monitor,
        held_memory=held_memory,
        opener=opener,
        layouts=layouts,
        last_layouts=LastLayouts(document, layouts, opener, library, notices, parent),
        auto_layouts=auto_layouts,
        side_files=SideFileController(document, background, settings, notices, parent),
        speeds=speeds,
        unloader=unloader,
        several=SeveralModels(
            models, document, opener, loader, live, auto_layouts, speeds, settings, background, notices, parent
        ),
        unload_offers=UnloadOffers(document, models, live, loader, speeds, settings, background, notices, parent),
        other_layouts=OtherLayouts(document, models, unloader, live, notices, parent),
        library=library,
        examiner=examiner,
        comparer=LayoutComparer(models, speeds, unloader, background, notices, parent),
        finder=HubFinder(
            live=live,
            models=models,
            auto_layouts=auto_layouts,
            speeds=speeds,
            access=access,
            downloads=DownloadController(access, notices, parent),
            background=background,
            notices=notices,
            parent=parent,
        ),
        archive=archive,
        chat_controller=ChatController(archive, models, settings, notices, opener.show, parent),
        states=KvStateRepository(saved_states_path(), settings, background, notices, parent),
        server=WindowApiServer(make_served, settings, background, parent),
        presets=PresetStore(presets_path(), models, background, notices, parent),
        typesetter=Typesetter(
            # Two threads: `FormulaProcess` is for one thread, and text does not wait for formulas.
            Worker("parse").submit,
            Worker("draw formulas").submit,
            parent,
            draw_formula=partial(_draw_formula, formulas),
        ),
        formulas=formulas,
        vocabulary=VocabularyCounter(),
    )
    _connect_notices(desk)
    _connect_chats(desk)
    # The first model was added by the constructor of `OpenModels`, before anybody could connect to `added`.
    for model in models.all:
        _connect_model(desk, model)
    models.added.connect(lambda model: _connect_model(desk, model))
    return desk


def _held_endpoints(models: OpenModels) -> list[str]:
    return [endpoint for model in models.held for endpoint in model.endpoints]


def _connect_chats(desk: Desk) -> None:
    """Connect the signals, so that saved KV states are deleted and restored together with their conversations."""
    desk.archive.deleted.connect(desk.states.forget)
    desk.archive.brought_back.connect(desk.states.remember)
    desk.archive.is_open_now.connect(desk.states.start)


def _draw_formula(formulas: FormulaProcess, key: FormulaKey) -> Formula | None:
    drawn = formulas.draw(key.source, is_display=key.is_display, colour=key.colour)
    if drawn is None:
        return None
    return Formula(drawn.svg.encode(), drawn.width_px, drawn.height_px, drawn.depth_px)


def _connect_notices(desk: Desk) -> None:
    """Connect signals with messages for the user, such as low memory, to the status line."""
    notices = desk.notices
    desk.loader.notice.connect(notices.given)
    desk.headroom_monitor.alarmed.connect(lambda sentence: notices.show(sentence, bad=True))
    # Withdrawn by its text, so that a newer notice stays.
    desk.headroom_monitor.alarm_ended.connect(notices.withdraw)


def _connect_model(desk: Desk, model: OpenModel) -> None:
    prober = desk.prober

    def on_phase_changed(phase: Phase) -> None:
        if phase is Phase.LOADING:
            # A running probe occupies workers that the load needs: an RPC server serves one client at a time.
            prober.cancel()

    desk.speeds.follow(model)
    desk.library.follow(model)
    model.loading.phase_changed.connect(on_phase_changed)
    # A model that is loaded cannot be probed: it holds its memory itself.
    model.loading.released.connect(prober.restart)
    desk.held_memory.follow(model)
    desk.other_layouts.follow(model)
    ModelKvStates(model, desk.states, model)

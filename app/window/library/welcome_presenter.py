"""The first page: tells it what this computer has, and opens what people choose there."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from PySide6.QtCore import QObject, QTimer

from app.background import Background
from app.demo import fetched_demo
from app.load.loader import Loader
from app.models.opener import ModelOpener
from app.notices import Notices
from app.paths import chats_path
from app.rig.live_rig import LiveRig
from app.window.main_window import MainWindow
from engine.base.language import tr
from engine.base.units import format_bytes
from engine.devices.device import Rig
from widgets.library.welcome_panel import WelcomePanel


def machine_lines(rig: Rig) -> list[str]:
    """Return what this computer has, for people: the processor, and cards or what stands for them."""
    lines = [
        tr("This computer: {name}, {total} of memory.", name=rig.host.name, total=format_bytes(rig.host.total_bytes))
    ]
    cards = [device for device in rig.devices if not device.is_rpc]
    lines += [f"{device.id}: {device.name}, {format_bytes(device.total_bytes)}." for device in cards]
    if not cards:
        lines.append(tr("No graphics card that the engine can use."))
    return lines


def places_text(home: Path) -> str:
    """Return where models and conversations are kept."""
    kept = str(chats_path().parent).replace(str(home), "~", 1)
    return tr(
        "Models stay where they are; downloads go to the Hugging Face cache or where you say. "
        "Conversations are kept in {kept}.",
        kept=kept,
    )


class WelcomePresenter(QObject):
    """Puts the page into the middle of `main`, where no model was ever opened."""

    def __init__(
        self,
        main: MainWindow,
        *,
        opener: ModelOpener,
        loader: Loader,
        live: LiveRig,
        background: Background,
        notices: Notices,
        open_file: Callable[[], None],
        show_library: Callable[[], None],
    ) -> None:
        super().__init__(main)
        self._main = main
        self._opener, self._loader, self._live = opener, loader, live
        self.panel = WelcomePanel()
        self.panel.show_places(places_text(Path.home()))
        self.panel.talk_requested.connect(self._talk)
        self.panel.open_requested.connect(open_file)
        self.panel.library_requested.connect(show_library)
        live.rig_changed.connect(self._show_machine)
        self._show_machine()
        main.editor.show_while_empty(self.panel)
        if self.panel.isVisible():
            self.panel.talk_button.setFocus()
        background.run(
            "Looking for the demo model",
            fetched_demo,
            lambda path: self.panel.show_demo(speaks=path is not None),
            notices.tell,
            quiet=True,
        )

    def _show_machine(self) -> None:
        self.panel.show_machine(machine_lines(self._live.rig))

    def _talk(self) -> None:
        # Loaded after everybody else has heard of the model.
        self._opener.try_demo(opened=lambda: QTimer.singleShot(0, self._begin))

    def _begin(self) -> None:
        """Load it, and let people type their question meanwhile."""
        self._loader.load()
        chat = self._main.chats.currentWidget()
        if chat is not None and chat.isVisible():
            chat.setFocus()

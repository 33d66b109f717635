"""The presenter of the welcome page, which describes this computer and opens a first model."""

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
    """Return lines of text that describe this computer: its processor and memory, and each of its GPUs."""
    lines = [
        tr("This computer: {name}, {total} of memory.", name=rig.host.name, total=format_bytes(rig.host.total_bytes))
    ]
    cards = [device for device in rig.devices if not device.is_rpc]
    lines += [f"{device.id}: {device.name}, {format_bytes(device.total_bytes)}." for device in cards]
    if not cards:
        lines.append(tr("The engine finds no GPU that it can use."))
    return lines


def folders_text(home: Path) -> str:
    """Return a text that names the folders of models and conversations. `home`: the user's home folder."""
    kept = str(chats_path().parent).replace(str(home), "~", 1)
    return tr(
        "Models stay where they are. Downloads go to the Hugging Face cache or to a folder of your choice. "
        "Conversations are saved in {folder}.",
        folder=kept,
    )


class WelcomePresenter(QObject):
    """Shows the welcome page in place of the layout editor until a model is opened."""

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
        self.panel.show_folders(folders_text(Path.home()))
        self.panel.talk_requested.connect(self._talk)
        self.panel.open_requested.connect(open_file)
        self.panel.library_requested.connect(show_library)
        live.rig_changed.connect(self._show_machine)
        self._show_machine()
        main.editor.show_while_empty(self.panel)
        # `isVisible` is false as long as the window is not shown; `isVisibleTo` ignores that.
        if self.panel.isVisibleTo(main):
            self.panel.talk_button.setFocus()
        # In the background: looking for the file may wait for the disk.
        background.run(
            "Looking for the demo model",
            fetched_demo,
            lambda path: self.panel.show_demo(speaks=path is not None),
            notices.show_error,
            quiet=True,
        )

    def _show_machine(self) -> None:
        self.panel.show_machine(machine_lines(self._live.rig))

    def _talk(self) -> None:
        # Loaded after everybody else has heard of the model.
        self._opener.try_demo(opened=lambda: QTimer.singleShot(0, self._begin))

    def _begin(self) -> None:
        """Load the current model, and set the keyboard focus to its chat."""
        self._loader.load()
        chat = self._main.chats.currentWidget()
        if chat is not None and chat.isVisible():
            chat.setFocus()

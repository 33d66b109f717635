"""The self-test of the Devices menu: whether a local device may be several entries of one layout."""

from __future__ import annotations

from pathlib import Path

from PySide6.QtCore import QObject

from app.background import Background
from app.demo import ensure_demo
from app.notices import Notices
from app.paths import self_test_path
from app.rig.device_search import DeviceSearch
from app.rig.live_rig import LiveRig
from engine.language import tr
from engine.rigs.self_test import keep_verdict, try_repeated


class RepeatTest(QObject):
    """Tests one device of each backend: the verdict is the backend's."""

    def __init__(
        self,
        live: LiveRig,
        search: DeviceSearch,
        background: Background,
        notices: Notices,
        verdicts: Path | None = None,
        parent: QObject | None = None,
    ) -> None:
        super().__init__(parent)
        self._live = live
        self._search = search
        self._background = background
        self._notices = notices
        self._verdicts = verdicts or self_test_path()

    def run(self) -> None:
        """Test, keep and say the verdicts, and look for devices again, which are judged by them."""
        rig, path = self._live.devices.rig, self._verdicts
        # The last of each backend stands for all of them.
        tested = {device.backend: device for device in rig.devices if not device.is_rpc}
        if not tested:
            self._notices.say(tr("There is no local GPU to test; CPU and remote devices may always come twice."))
            return

        def test() -> str:
            model = ensure_demo()
            sentences = []
            for device in tested.values():
                result = try_repeated(rig, device.id, model)
                keep_verdict(path, device, result)
                verdict = (
                    tr("{backend} devices may come twice in a layout.", backend=device.backend)
                    if result.passed
                    else tr("{backend} devices cannot come twice in a layout.", backend=device.backend)
                )
                sentences.append(verdict)
            return " ".join(sentences)

        def show(sentence: str) -> None:
            self._notices.say(sentence)
            self._search.refresh()

        self._background.run(tr("Testing devices"), test, show, self._notices.tell)

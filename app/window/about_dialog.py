"""The About dialog: versions, folders and licences of this installation, as text that can be copied."""

from __future__ import annotations

import platform
import re
import sys
from collections.abc import Iterable
from importlib import metadata
from pathlib import Path

from msgspec import Struct
from PySide6.QtCore import Qt, qVersion
from PySide6.QtWidgets import (
    QApplication,
    QGridLayout,
    QPlainTextEdit,
    QTabWidget,
    QWidget,
)

from app.packs import pack_installer
from app.paths import APPLICATION, chats_path, fetched_models_path, log_path, saved_states_path, settings_path
from engine.base.engine_build import engine_build
from engine.base.language import tr
from engine.devices.device import Rig
from engine.devices.packs.store import ListedPack
from engine.machines.doctor.installed import backends_built
from resources.loader import folder
from widgets.common.dialog import Dialog
from widgets.common.roles import plain_label
from widgets.library.welcome_panel import NOTHING_SENT

NOTICES = "THIRD-PARTY-NOTICES.txt"
"""File name of the licence texts next to the bundle's executable. The build of the bundle writes the file."""
NO_LICENCE = tr("The licence file is missing. The licence is in the source repository of Layerdeck.")


class AboutContents(Struct, frozen=True):
    """Contents of the About dialog.

    `versions`, `folders`: rows of (name, value).
    `licence`: text of Layerdeck's licence.
    `notices`: names and licences of the libraries that Layerdeck uses.
    """

    versions: tuple[tuple[str, str], ...]
    folders: tuple[tuple[str, str], ...]
    licence: str
    notices: str

    @property
    def text(self) -> str:
        """Versions and folders as text for the clipboard, one on each line."""
        return "\n".join(f"{name}: {value}" for name, value in (*self.versions, *self.folders))


def gather_contents(rig: Rig) -> AboutContents:
    """Return versions, folders and licences of this installation, with the devices of `rig`.

    Reads many files, so it must not be called in the GUI thread.
    """
    return AboutContents(
        versions=(
            ("Layerdeck", _version(APPLICATION)),
            (tr("Engine"), engine_build()),
            (tr("Built-in backends"), ", ".join(backends_built()) or tr("unknown")),
            (tr("Engine packs"), "; ".join(_pack_text(pack) for pack in pack_installer().listed()) or tr("none")),
            (tr("Devices"), ", ".join(f"{device.id} ({device.backend})" for device in rig.all_devices)),
            ("Python", f"{platform.python_version()} ({platform.python_implementation()})"),
            ("Qt", f"{qVersion()}, PySide6 {_version('PySide6_Essentials')}"),
            (tr("System"), platform.platform()),
        ),
        folders=(
            (tr("Settings"), str(settings_path().parent)),
            (tr("Conversations and library"), str(chats_path().parent)),
            (tr("Models downloaded during setup"), str(fetched_models_path())),
            (tr("Saved KV states"), str(saved_states_path())),
            (tr("Log"), str(log_path().parent)),
        ),
        licence=_first_text((folder().parent / "LICENSE", _bundled_path("LICENSE"))) or NO_LICENCE,
        notices=_first_text((_bundled_path(NOTICES),)) or listed_licences(),
    )


def listed_licences() -> str:
    """Return a text with a line for each direct or indirect dependency: its name, version and licence."""
    lines = []
    for distribution in sorted(_used_distributions(), key=lambda each: each.name.lower()):
        fields = distribution.metadata.json
        # `License-Expression` is of PEP 639. Older packages have `License`, and some put the whole licence text into
        # it.
        declared = str(fields.get("license_expression") or fields.get("license") or "")
        # Classifiers have the form `License :: OSI Approved :: MIT License`; the last part is the name.
        classified = [line.rpartition("::")[2].strip() for line in fields.get("classifier", ()) if "License ::" in line]
        licence = declared if declared and "\n" not in declared and len(declared) < 80 else ", ".join(classified)
        lines.append(
            f"{distribution.name} {distribution.version}: {licence or tr('see the licence files of the package')}"
        )
    return "\n".join([tr("Third-party software, each under its own licence:"), "", *lines])


def _used_distributions() -> list[metadata.Distribution]:
    found: dict[str, metadata.Distribution] = {}
    waiting = [APPLICATION]
    while waiting:
        name = waiting.pop()
        key = _plain(name)
        if key in found:
            continue
        try:
            found[key] = metadata.distribution(name)
        except metadata.PackageNotFoundError:  # for another system, or within the bundle's executable
            continue
        # Requirements of extras are optional, so they need not be installed.
        asked = (line for line in found[key].requires or () if "extra ==" not in line)
        waiting += [match.group() for line in asked if (match := _NAME.match(line))]
    return [each for key, each in found.items() if key != APPLICATION]


# A requirement (PEP 508) begins with the name of a project; extras, versions and markers follow.
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")


def _plain(name: str) -> str:
    # The normalised name of PEP 503: requirements and distributions may spell it differently.
    return re.sub(r"[-_.]+", "-", name).lower()


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return tr("not installed")


def _pack_text(pack: ListedPack) -> str:
    return f"{pack.name} {pack.engine}: {pack.words.removesuffix('.')}"


def _bundled_path(name: str) -> Path:
    return Path(sys.executable).parent / name


def _first_text(paths: Iterable[Path]) -> str:
    for path in paths:
        try:
            return path.read_text(encoding="utf-8", errors="replace")
        except OSError:
            continue
    return ""


ABOUT = tr(
    "Layerdeck places the layers of a model on your devices, loads the model that way, and lets you chat with it."
)


class AboutDialog(Dialog):
    """The About dialog, with tabs for versions and folders, for the licence, and for the licences of libraries."""

    def __init__(self, parent: QWidget, contents: AboutContents) -> None:
        super().__init__(tr("About Layerdeck"), parent, once=True)
        self.contents = contents
        tabs = QTabWidget()
        tabs.setAccessibleName(tr("About Layerdeck"))
        tabs.addTab(_table((*contents.versions, *contents.folders)), tr("Versions and folders"))
        tabs.addTab(_text(tr("Licence of Layerdeck"), contents.licence), tr("Licence"))
        tabs.addTab(_text(tr("Licences of third-party software"), contents.notices), tr("Third-Party Software"))
        self.copy_button = self.add_button(tr("Copy Versions"), self._on_copy)
        self.lay_out(plain_label(ABOUT, "strong", wrap=True), plain_label(NOTHING_SENT, "dim", wrap=True), tabs)
        self.resize(720, 480)

    def _on_copy(self) -> None:
        QApplication.clipboard().setText(self.contents.text)


def _table(rows: tuple[tuple[str, str], ...]) -> QWidget:
    content = QWidget()
    grid = QGridLayout(content)
    grid.setHorizontalSpacing(24)
    grid.setVerticalSpacing(6)
    grid.setColumnStretch(1, 1)
    for row, (name, value) in enumerate(rows):
        label = plain_label(value, wrap=True)
        label.setTextInteractionFlags(Qt.TextInteractionFlag.TextSelectableByMouse)
        grid.addWidget(plain_label(name, "dim"), row, 0, Qt.AlignmentFlag.AlignTop)
        grid.addWidget(label, row, 1)
    grid.setRowStretch(len(rows), 1)
    return content


def _text(name: str, text: str) -> QPlainTextEdit:
    view = QPlainTextEdit(text)
    view.setAccessibleName(name)
    view.setReadOnly(True)
    view.setLineWrapMode(QPlainTextEdit.LineWrapMode.WidgetWidth)
    return view

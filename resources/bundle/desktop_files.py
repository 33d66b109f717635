"""Menu entry, file type, software-centre entry (AppStream) and icons, in the folder structure of `/usr/share`."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

ICON_SIZES_PX = (16, 24, 32, 48, 64, 128, 256, 512)
RESOURCES = Path(__file__).resolve().parents[1]
PLACES = {
    "layerdeck.desktop": "applications/layerdeck.desktop",
    "layerdeck-mime.xml": "mime/packages/layerdeck.xml",
    "layerdeck.metainfo.xml": "metainfo/io.github.layerdeck.layerdeck.metainfo.xml",
}


def write_share(folder: Path) -> None:
    """Write menu entry, file type, AppStream entry and icons into `folder`."""
    for source, place in PLACES.items():
        _copy(RESOURCES / "desktop" / source, folder / place)
    icons = folder / "icons" / "hicolor"
    picture = RESOURCES / "layerdeck.svg"
    _copy(picture, icons / "scalable" / "apps" / "layerdeck.svg")
    _copy(picture, icons / "scalable" / "mimetypes" / "application-x-gguf.svg")
    for size_px in ICON_SIZES_PX:
        draw_icon(picture, size_px, icons / f"{size_px}x{size_px}" / "apps" / "layerdeck.png")


def _copy(source: Path, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(source, target)


def draw_icon(picture: Path, size_px: int, target: Path) -> None:
    """Render an SVG as a square image of `size_px` pixels. The suffix of `target` (png, ico) chooses the format."""
    os.environ.setdefault("QT_QPA_PLATFORM", "offscreen")
    from PySide6.QtCore import Qt
    from PySide6.QtGui import QImage, QPainter
    from PySide6.QtSvg import QSvgRenderer

    image = QImage(size_px, size_px, QImage.Format.Format_ARGB32_Premultiplied)
    image.fill(Qt.GlobalColor.transparent)
    painter = QPainter(image)
    QSvgRenderer(str(picture)).render(painter)
    painter.end()
    target.parent.mkdir(parents=True, exist_ok=True)
    if not image.save(str(target)):
        raise OSError(f"{target} cannot be written")

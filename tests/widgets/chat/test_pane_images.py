"""Images in the chat pane: pasted and dropped ones are reported unchanged, and thumbnails appear as they arrive."""

from __future__ import annotations

from PySide6.QtCore import QMimeData
from PySide6.QtGui import QColor, QImage
from pytestqt.qtbot import QtBot

from tests.support.pictures import picture
from tests.widgets.chat.conftest import exchange
from widgets.chat.attachment_row import AttachedFile
from widgets.chat.chat_pane import ChatPane
from widgets.chat.images import PICTURE_PX
from widgets.chat.shown import ShownImage, ShownMessage

RED = b"\xff\x00\x00"


def test_a_pasted_image_is_told_of_as_it_came(pane: ChatPane, qtbot: QtBot) -> None:
    data, clipboard = picture(), QMimeData()
    clipboard.setData("image/png", data)
    with qtbot.waitSignal(pane.image_given) as given:
        pane.prompt_edit.insertFromMimeData(clipboard)
    assert given.args == [data]
    assert not pane.prompt_edit.toPlainText()


def test_pixels_without_a_file_become_one(pane: ChatPane, qtbot: QtBot) -> None:
    image, clipboard = QImage(3, 2, QImage.Format.Format_RGB888), QMimeData()
    image.fill(QColor("red"))
    clipboard.setImageData(image)
    with qtbot.waitSignal(pane.image_given) as given:
        pane.prompt_edit.insertFromMimeData(clipboard)
    assert given.args is not None
    assert given.args[0].startswith(b"\x89PNG")


def test_text_with_a_picture_of_it_is_pasted_as_text(pane: ChatPane, qtbot: QtBot) -> None:
    clipboard = QMimeData()
    clipboard.setText("a table")
    clipboard.setData("image/png", picture())
    with qtbot.assertNotEmitted(pane.image_given):
        pane.prompt_edit.insertFromMimeData(clipboard)
    assert pane.prompt_edit.toPlainText() == "a table"


def test_pictures_are_asked_for_once_and_take_their_place_before_they_come(pane: ChatPane) -> None:
    gallery, wanted = pane.message_list.gallery, list[str]()
    gallery.wanted.connect(wanted.append)
    images = (ShownImage("one", "cat.png", 400, 200), ShownImage("two", "dog.png", 100, 200))
    messages = [ShownMessage("q", "user", "You", "What?", images=images), *exchange(number=1)]
    pane.show_messages(messages)
    strip = pane.message_list.bubble("q").images  # type: ignore[union-attr]
    assert wanted == ["one", "two"]
    assert strip.height() == PICTURE_PX
    assert strip.accessibleName() == "Images: cat.png, dog.png"
    height = strip.height()
    gallery.put("one", 2, 1, RED * 2)
    pane.show_messages(messages)
    shown = strip.grab().toImage()
    assert strip.height() == height
    assert shown.pixelColor(round(10 * shown.devicePixelRatio()), 10) == QColor("red")
    assert wanted == ["one", "two"]


def test_the_chip_of_an_image_shows_it(pane: ChatPane) -> None:
    gallery = pane.message_list.gallery
    gallery.put("one", 1, 1, RED)
    pane.show_files([AttachedFile("a", "cat.png", "64 tokens", picture="one")], is_reading=False)
    shown = pane.attachments.grab().toImage()
    colours = {shown.pixelColor(x, y).name() for x in range(0, shown.width(), 3) for y in range(0, shown.height(), 3)}
    assert "#ff0000" in colours

"""Garbage with Qt objects is collected in the GUI thread, whatever other threads do."""

from __future__ import annotations

import gc
import threading

from PySide6.QtCore import QObject, Qt
from PySide6.QtWidgets import QLabel
from pytestqt.qtbot import QtBot

from app.garbage import GarbageCollector


class Cyclic(QLabel):
    """A label in a reference cycle, which only the garbage collector deletes."""

    def __init__(self) -> None:
        super().__init__()
        self.cycle = self


def allocate() -> None:
    kept: list[object] = []
    for _ in range(200_000):
        kept.append({"cycle": kept})


def test_a_thread_that_allocates_much_deletes_no_widget(qtbot: QtBot) -> None:
    gc.enable()
    parent = QObject()
    collector = GarbageCollector(parent)
    deleted_in: list[int] = []
    Cyclic().destroyed.connect(lambda: deleted_in.append(threading.get_ident()), Qt.ConnectionType.DirectConnection)
    thread = threading.Thread(target=allocate)
    thread.start()
    thread.join()
    assert deleted_in == []
    collector.collect()
    assert deleted_in == [threading.get_ident()]


def test_older_garbage_is_collected_from_time_to_time(qtbot: QtBot) -> None:
    parent = QObject()
    collector = GarbageCollector(parent)
    deleted: list[bool] = []
    old = Cyclic()
    old.destroyed.connect(lambda: deleted.append(True))
    gc.collect(1)
    del old
    for _ in range(200):
        young: list[list[object]] = [[] for _ in range(6000)]
        collector.collect()
        young.clear()
    assert deleted == [True]

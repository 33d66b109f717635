"""The Qt model of the library's list: 10,000 rows cost what the visible ones cost."""

from __future__ import annotations

from collections.abc import Sequence

from PySide6.QtCore import QAbstractListModel, QModelIndex, QObject, Qt

from engine.library.listed import Listed
from widgets.common.tool_tips import plain_tool_tip
from widgets.library.entry_words import RowWords, row_words
from widgets.library.recent_list_model import AnyIndex

WORDS_ROLE = Qt.ItemDataRole.UserRole + 1


class LibraryListModel(QAbstractListModel):
    """Rows in the order in which they are given; words are made when a row is first asked for."""

    def __init__(self, parent: QObject | None = None) -> None:
        super().__init__(parent)
        self._models: tuple[Listed, ...] = ()
        self._words: dict[int, RowWords] = {}

    @property
    def models(self) -> tuple[Listed, ...]:
        return self._models

    def set_models(self, models: Sequence[Listed]) -> bool:
        """Replace the list; return whether rows changed places, so that a selection has to be found again."""
        shown = tuple(models)
        same_rows = [model.entry.key for model in shown] == [model.entry.key for model in self._models]
        if same_rows:
            self._models, self._words = shown, {}
            if shown:
                self.dataChanged.emit(self.index(0), self.index(len(shown) - 1))
            return False
        self.beginResetModel()
        self._models, self._words = shown, {}
        self.endResetModel()
        return True

    def model_at(self, index: AnyIndex) -> Listed | None:
        """Return the model in this row."""
        return self._models[index.row()] if index.isValid() and index.row() < len(self._models) else None

    def row_of(self, key: str) -> int | None:
        """Return the row of the entry with this key."""
        return next((row for row, model in enumerate(self._models) if model.entry.key == key), None)

    def rowCount(self, parent: AnyIndex = QModelIndex()) -> int:  # noqa: B008 - Qt's signature
        return 0 if parent.isValid() else len(self._models)

    def data(self, index: AnyIndex, role: int = Qt.ItemDataRole.DisplayRole) -> object:
        model = self.model_at(index)
        if model is None:
            return None
        match role:
            case Qt.ItemDataRole.DisplayRole:
                return model.entry.title
            case Qt.ItemDataRole.ToolTipRole:
                return plain_tool_tip("\n".join(str(copy.path) for copy in model.chosen.copies))
            case Qt.ItemDataRole.AccessibleTextRole:
                return self._words_of(index.row()).spoken
            case _ if role == WORDS_ROLE:
                return self._words_of(index.row())
        return None

    def _words_of(self, row: int) -> RowWords:
        words = self._words.get(row)
        if words is None:
            words = self._words[row] = row_words(self._models[row])
        return words

"""The Qt model of recently opened models."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from PySide6.QtCore import QAbstractListModel, QModelIndex, QObject, QPersistentModelIndex, Qt

from widgets.common.tool_tips import plain_tool_tip
from widgets.library.recent_model import RecentModel

DETAIL_ROLE = Qt.ItemDataRole.UserRole + 1
CURRENT_ROLE = Qt.ItemDataRole.UserRole + 2
SEARCH_ROLE = Qt.ItemDataRole.UserRole + 3
AnyIndex = QModelIndex | QPersistentModelIndex


class RecentListModel(QAbstractListModel):
    """Titles, details and which one is open now."""

    def __init__(self, parent: QObject | None = None) -> None:
        super().__init__(parent)
        self._models: tuple[RecentModel, ...] = ()
        self._current: Path | None = None

    def set_models(self, models: Sequence[RecentModel]) -> None:
        """Replace the list."""
        self.beginResetModel()
        self._models = tuple(models)
        self.endResetModel()

    def set_current(self, path: Path | None) -> None:
        """Mark the model at `path` as the open one."""
        self._current = path
        if self._models:
            self.dataChanged.emit(self.index(0), self.index(len(self._models) - 1), [CURRENT_ROLE])

    def model_at(self, index: AnyIndex) -> RecentModel:
        """Return the model in this row."""
        return self._models[index.row()]

    def rowCount(self, parent: AnyIndex = QModelIndex()) -> int:  # noqa: B008 - Qt's signature
        return 0 if parent.isValid() else len(self._models)

    def data(self, index: AnyIndex, role: int = Qt.ItemDataRole.DisplayRole) -> object:
        if not index.isValid() or index.row() >= len(self._models):
            return None
        model = self._models[index.row()]
        match role:
            case Qt.ItemDataRole.DisplayRole:
                return model.title
            case Qt.ItemDataRole.ToolTipRole:
                return plain_tool_tip(str(model.path))
            case Qt.ItemDataRole.AccessibleTextRole:
                return f"{model.title}, {model.detail}"
            case _ if role == DETAIL_ROLE:
                return model.detail
            case _ if role == CURRENT_ROLE:
                return model.path == self._current
            case _ if role == SEARCH_ROLE:
                return f"{model.title} {model.detail} {model.path.name}"
        return None

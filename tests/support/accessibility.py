"""Walks through the accessibility tree that Qt gives to screen readers."""

from __future__ import annotations

from collections.abc import Iterator

from PySide6.QtCore import QObject
from PySide6.QtGui import QAccessible, QAccessibleInterface

_Role = QAccessible.Role
CONTROLS = frozenset(
    {
        _Role.Button,
        _Role.ButtonDropDown,
        _Role.ButtonMenu,
        _Role.CheckBox,
        _Role.ComboBox,
        _Role.EditableText,
        _Role.HotkeyField,
        _Role.Link,
        _Role.List,
        _Role.MenuItem,
        _Role.PageTab,
        _Role.ProgressBar,
        _Role.RadioButton,
        _Role.Slider,
        _Role.SpinBox,
        _Role.Splitter,
        _Role.Table,
        _Role.Tree,
    }
)
"""Roles of controls. Each control must have a name or description."""


def interface_of(thing: QObject) -> QAccessibleInterface:
    """Return the accessibility interface of an object."""
    interface = QAccessible.queryAccessibleInterface(thing)
    assert interface is not None
    return interface


def walk(interface: QAccessibleInterface) -> Iterator[QAccessibleInterface]:
    """Yield `interface` and all visible interfaces below it."""
    if interface.state().invisible:
        return
    yield interface
    for index in range(interface.childCount()):
        child = interface.child(index)
        if child is not None:
            yield from walk(child)


def name_of(interface: QAccessibleInterface) -> str:
    return interface.text(QAccessible.Text.Name)


def _is_told(interface: QAccessibleInterface) -> bool:
    """Return whether a control has a name for screen readers.

    For a combo box its description or a related label counts: on some systems Qt gives the chosen entry as its name.
    """
    if interface.role() is not _Role.ComboBox:
        return bool(name_of(interface).strip())
    return bool(interface.text(QAccessible.Text.Description).strip()) or bool(interface.relations())


def nameless(root: QObject) -> list[str]:
    """Return the controls under `root` without a name, each as role, class and class of its parent."""
    found = []
    for each in walk(interface_of(root)):
        state = each.state()
        is_control = each.role() in CONTROLS or bool(state.focusable)
        if is_control and not _is_told(each) and not _is_part(each):
            found.append(_describe(each))
    return found


def _is_part(interface: QAccessibleInterface) -> bool:
    """Return whether it belongs to a combo box or a spin box, such as its line edit or its list."""
    parent = interface.parent()
    while parent is not None:
        if parent.role() in (_Role.ComboBox, _Role.SpinBox):
            return True
        parent = parent.parent()
    return False


def _describe(interface: QAccessibleInterface) -> str:
    thing = interface.object()
    around = thing.parent() if isinstance(thing, QObject) else None
    names = f"{type(thing).__name__} in {type(around).__name__}" if thing is not None else "no object"
    return f"{interface.role().name}: {names}, {interface.text(QAccessible.Text.Value)[:40]!r}"

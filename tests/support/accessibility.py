"""Walks through what Qt tells screen readers."""

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
"""Roles of what somebody looks for or works with: each has to say what it is."""


def interface_of(thing: QObject) -> QAccessibleInterface:
    """Return what Qt tells of `thing`."""
    interface = QAccessible.queryAccessibleInterface(thing)
    assert interface is not None
    return interface


def walk(interface: QAccessibleInterface) -> Iterator[QAccessibleInterface]:
    """Go through `interface` and all below it that is to be seen."""
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
    """Return whether a screen reader says what a control is for.

    Of a box to choose from Qt gives out what is chosen as its name, on some systems: there it is the label beside it,
    or its description.
    """
    if interface.role() is not _Role.ComboBox:
        return bool(name_of(interface).strip())
    return bool(interface.text(QAccessible.Text.Description).strip()) or bool(interface.relations())


def nameless(root: QObject) -> list[str]:
    """Return the controls under `root` that do not say what they are: role, class and the class around it."""
    found = []
    for each in walk(interface_of(root)):
        state = each.state()
        is_control = each.role() in CONTROLS or bool(state.focusable)
        if is_control and not _is_told(each) and not _is_part(each):
            found.append(_describe(each))
    return found


def _is_part(interface: QAccessibleInterface) -> bool:
    """Return whether it is a piece that Qt makes of a control with a name: the line of a box, the list it opens."""
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

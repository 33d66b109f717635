"""Construction and connection of all objects of the window.

Only this package has references to all objects: an object gets those that it uses as constructor arguments. If several
slots are connected to the same signal, Qt calls them in the order of these connections.
`rig` makes the objects for devices, `desk` all others that have no widgets, and `window` the window with its
presenters. `presenters` has a function for each part of the screen, `menu_bar` makes the menus and their actions.
`app.opening` calls `make_window` after `app.window.arrangement` has made the main window, and then shows it.
"""

from __future__ import annotations

from app.wiring.desk import Desk, make_desk
from app.wiring.rig import RigObjects, make_rig
from app.wiring.window import WindowObjects, make_window

__all__ = ["Desk", "RigObjects", "WindowObjects", "make_desk", "make_rig", "make_window"]

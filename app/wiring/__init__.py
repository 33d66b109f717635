"""The one place where the window's objects are made and connected.

Nothing else in `app` knows all of them: each is given what it uses. The order within a function is the order in which
slots are called, where several follow the same signal.

`rig` makes what there is to the devices, `desk` all else that has no widgets, `window` the window on top of that:
`presenters` has a function for each part of the screen, `menu_bar` what the menus do.

`app.opening` calls `make_window` after `app.window.arrangement` has made the window itself, and then shows it.
"""

from __future__ import annotations

from app.wiring.desk import Desk, make_desk
from app.wiring.rig import RigParts, make_rig
from app.wiring.window import WindowParts, make_window

__all__ = ["Desk", "RigParts", "WindowParts", "make_desk", "make_rig", "make_window"]

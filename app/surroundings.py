"""What the environment says of places: a home that is none, and folders that are no possible ones, are left aside.

Libraries take each its own way with these: one makes a folder named `~` where we were started, another raises, and so
does Python for each look at a path that is too long.
"""

from __future__ import annotations

import os
from collections.abc import MutableMapping
from pathlib import Path

from engine.base.language import tr

_FOLDERS = ("XDG_CONFIG_HOME", "XDG_DATA_HOME", "XDG_STATE_HOME", "XDG_CACHE_HOME", "XDG_RUNTIME_DIR")
"""Relative ones are to be ignored (XDG Base Directory Specification); an empty one is as if it were not there."""
_MOST_BYTES, _MOST_OF_A_NAME = 3000, 255
"""Of a folder, so that our files in it have names that the system takes."""
_NO_HOME = "/"
"""For a user whom the system does not know, as in a container: nothing can be written there, which is said."""


def settle_places(environment: MutableMapping[str, str]) -> str:
    """Leave nothing in `environment` that is no place, for us and our children; return a sentence where that was so."""
    if os.name != "posix":
        return ""
    wrong = []
    home = environment.get("HOME", "")
    if not _is_possible(home):
        environment["HOME"] = _home_of_user()
        if home:
            wrong.append(tr("HOME={home} ({used} is used)", home=_quoted(home), used=environment["HOME"]))
    for name in _FOLDERS:
        folder = environment.get(name, "")
        if not _is_possible(folder):
            environment.pop(name, None)
            if folder:
                wrong.append(f"{name}={_quoted(folder)}")
    names = ", ".join(wrong)
    return tr("Left aside, as no absolute path, or too long: {names}.", names=names) if wrong else ""


def _quoted(folder: str) -> str:
    from engine.model.gguf.quoting import quote  # every command comes by here, and hardly one has something to quote

    return quote(folder)


def _home_of_user() -> str:
    import pwd

    try:
        found = pwd.getpwuid(os.getuid()).pw_dir
    except KeyError:
        found = ""
    return found if _is_possible(found) else _NO_HOME


def _is_possible(folder: str) -> bool:
    data = os.fsencode(folder)
    is_short = len(data) <= _MOST_BYTES and max(map(len, data.split(b"/"))) <= _MOST_OF_A_NAME
    return is_short and Path(folder).is_absolute()

"""Repair of the environment variables that name folders: HOME and the XDG folders.

Libraries react differently to a bad value: one makes a folder named `~` in the current folder, another raises, and
Python raises at each access to a path that is too long. So bad values are replaced or removed at the program's start.
"""

from __future__ import annotations

import os
from collections.abc import MutableMapping
from pathlib import Path

from engine.base.language import tr

_FOLDERS = ("XDG_CONFIG_HOME", "XDG_DATA_HOME", "XDG_STATE_HOME", "XDG_CACHE_HOME", "XDG_RUNTIME_DIR")
"""Variables to check. By the XDG Base Directory Specification, a relative path or an empty value counts as unset."""
_MOST_BYTES, _MOST_OF_A_NAME = 3000, 255
"""Largest length in bytes of a folder's path, and of one name in it.
With these limits, the paths of our files in the folder are not too long for the system."""
_NO_HOME = "/"
"""HOME for a user without an entry in passwd, as in a container. Writing to this folder fails with a message."""


def repair_home(environment: MutableMapping[str, str]) -> str:
    """Replace a bad HOME in `environment`, and remove XDG variables with a bad value. Children inherit the result.

    A value is bad if it is not an absolute path or is too long.

    Returns:
        A message for the user about the bad values; empty if there were none.
    """
    if os.name != "posix":
        return ""
    wrong = []
    home = environment.get("HOME", "")
    if not _is_possible(home):
        environment["HOME"] = _home_of_user()
        if home:
            wrong.append(
                tr("HOME={home} (Layerdeck uses {used} instead)", home=_quoted(home), used=environment["HOME"])
            )
    for name in _FOLDERS:
        folder = environment.get(name, "")
        if not _is_possible(folder):
            environment.pop(name, None)
            if folder:
                wrong.append(f"{name}={_quoted(folder)}")
    names = ", ".join(wrong)
    if not wrong:
        return ""
    return tr(
        "These environment variables were ignored, because their paths are relative or too long: {names}. Correct or "
        "unset them.",
        names=names,
    )


def _quoted(folder: str) -> str:
    from engine.base.texts import quote  # late: every command runs this, and few quote

    return quote(folder)


def _home_of_user() -> str:
    # Only POSIX systems have this module.
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

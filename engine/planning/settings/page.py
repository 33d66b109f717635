"""Generates the page docs/settings.md from the table of load settings.

`python -m engine.planning.settings.page docs/settings.md` writes it; a test fails if it is out of date.
"""

from __future__ import annotations

import sys
from pathlib import Path

from engine.planning.settings.table import GROUPS, SETTINGS, Setting

_BEGINNING = """# Settings of a load

`python -m engine.planning.settings.page docs/settings.md` makes it from `engine/planning/settings/table.py`.

Each setting is a key of `context` in a layout file, an option of `layerdeck-cli plan` and `load`, and a row of the
settings dialog. A setting may be left open (`auto`; in files `null` for numbers other than the context length). It is
then decided at each load, and `decisions` has the value and the reason. Keys with \\* are written to a file only if
they are not the default; those with † do not change memory.
"""
_HEADINGS = "| key | option | values | default | effect |\n|---|---|---|---|---|\n"


def settings_page() -> str:
    """Return the text of docs/settings.md."""
    sections = [
        f"\n## {group}\n\n{_HEADINGS}" + "".join(_line(setting) for setting in SETTINGS if setting.group == group)
        for group in GROUPS
    ]
    return _BEGINNING + "".join(sections)


def _line(setting: Setting) -> str:
    marks = (r" \*" if setting.rare else "") + ("" if setting.affects_memory else " †")
    option = f"`{setting.flag} {setting.kind.placeholder}`"
    default = setting.kind.text_of(setting.default)
    return f"| `{setting.key}`{marks} | {option} | {setting.kind.allowed} | {default} | {setting.help} |\n"


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(settings_page(), encoding="utf-8")

"""The page of documentation: what each setting is, made from the table.

`python -m engine.planning.settings.page docs/settings.md` writes it anew; a test says when that is due.
"""

from __future__ import annotations

import sys
from pathlib import Path

from engine.planning.settings.table import GROUPS, SETTINGS, Setting

_BEGINNING = """# Settings of a load

Made from `engine/planning/settings/table.py`. To change it, edit the table and run
`python -m engine.planning.settings.page docs/settings.md`.

Each is a key of `context` in a layout file, an option of `layerdeck-cli plan` and `load`, and a row in the dialog with
all settings. What is left open (`auto`; in files `null` for numbers other than the length) is decided at each load, and
`decisions` says what became of it and why.
"""
_HEADINGS = "| key | option | may be | unless said | does |\n|---|---|---|---|---|\n"


def settings_page() -> str:
    """Return the page in Markdown."""
    sections = [
        f"\n## {group}\n\n{_HEADINGS}" + "".join(_line(setting) for setting in SETTINGS if setting.group == group)
        for group in GROUPS
    ]
    return _BEGINNING + "".join(sections)


def _line(setting: Setting) -> str:
    notes = [setting.help]
    if setting.rare:
        notes.append("written to a file only where it is chosen")
    if not setting.affects_memory:
        notes.append("no matter for memory")
    option = f"`{setting.flag} {setting.kind.placeholder}`"
    default = setting.kind.text_of(setting.default)
    return f"| `{setting.key}` | {option} | {setting.kind.allowed} | {default} | {'; '.join(notes)} |\n"


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(settings_page(), encoding="utf-8")

"""Every ending of a child in the log: how, its last words, what it was for, and with which versions.

No text of a conversation is there: a child says nothing of those on its standard error.
"""

from __future__ import annotations

import logging
import platform
import sys
from functools import cache
from importlib import metadata

from engine.process.outcome import EndReason, ProcessOutcome
from engine.texts import show

_LAST_LINES = 8
_log = logging.getLogger("layerdeck.engine")


def log_end(name: str, pid: int | None, outcome: ProcessOutcome, *, engine: str, about: str) -> None:
    """Write the ending of the child `name`; `engine` is what it said it runs, `about` what it worked on."""
    expected = outcome.reason is EndReason.STOPPED or outcome.exit_code == 0
    facts = [_how(outcome), about, engine, _versions()]
    if not expected:
        facts += [show(line, 300) for line in (outcome.abort_text, *outcome.stderr_tail[-_LAST_LINES:]) if line]
    # not a warning: it has been told to whoever waited for the child, and here it stands for those who look later
    _log.info("%s %s %s", name, pid, "\n".join(filter(None, facts)))


def _how(outcome: ProcessOutcome) -> str:
    if outcome.signal is not None:
        how = f"signal {outcome.signal}"
    elif outcome.exit_code is not None:
        how = f"exit code {outcome.exit_code}"
    else:
        how = "never ran"
    detail = f" ({show(outcome.detail, 300)})" if outcome.detail else ""
    return f"ended: {outcome.reason}, {how}{detail}"


@cache
def _versions() -> str:
    try:
        own = metadata.version("layerdeck")
    except metadata.PackageNotFoundError:
        own = "not installed"
    return f"Layerdeck {own}, Python {platform.python_version()}, {sys.platform} {platform.release()}"

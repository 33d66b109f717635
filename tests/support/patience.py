"""Deadline of waits in tests. It is far longer than any wait takes, so only a hang reaches it."""

DEADLINE_S = 120.0
DEADLINE_MS = round(DEADLINE_S * 1000)

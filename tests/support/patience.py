"""How long tests wait for what should happen: far beyond what it takes, on a busy machine too; only a hang meets it."""

DEADLINE_S = 120.0
DEADLINE_MS = round(DEADLINE_S * 1000)

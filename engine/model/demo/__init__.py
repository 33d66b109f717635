"""The demo models: one that the set-up downloads, and one that this program generates."""

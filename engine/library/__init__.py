"""The models that a computer has: found in folders and in other programs' stores, grouped, described and remembered."""

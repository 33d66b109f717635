"""How engine packs are built: `make.py pack`. Stands on the standard library alone."""

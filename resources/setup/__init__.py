"""Set-up of a clone, with only the standard library: environment, engine, demo model. `make.py` uses it.

It runs before anything is installed. `whole.py` has the steps in their order; each is a module of its own. `places.py`
has the paths, `build_plan.py` decides how the engine is built.
"""

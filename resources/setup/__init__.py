"""What `make.py` does: from a fresh clone to a window, a test run, an application. Standard library only.

It runs on a bare Python before anything is installed. `whole.py` has the steps in their order, each of which is a
module of its own; `places.py` says where things are, `build_plan.py` which engine is built.
"""

"""The session of one open model: its loads, its requests and its child process.

A pure state machine decides, a driver carries out its effects (actions), and a snapshot has the state for all readers.
"""

"""Settings of a load and of an answer, and the tables that files, command line options, dialogs and docs are made
from.
"""

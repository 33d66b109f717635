"""Export of layouts as commands and files of other programs, and import of such commands and files.

All functions are pure.
"""

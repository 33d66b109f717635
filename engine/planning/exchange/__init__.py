"""Export of layouts as commands and files of other programs, and import of these. All functions are pure."""

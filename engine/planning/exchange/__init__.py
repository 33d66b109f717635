"""Layouts as commands and files of other programs, and back. Pure: values in, text and notes out."""

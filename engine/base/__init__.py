"""Modules that all other packages of the engine use: errors, units, texts, files and limits of the system."""

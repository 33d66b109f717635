"""Builders of the layers of each architecture. Architecture records name them as "module.function"."""

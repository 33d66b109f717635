"""Builders of the layers of each architecture. Records name them as `MODULE.FUNCTION`."""

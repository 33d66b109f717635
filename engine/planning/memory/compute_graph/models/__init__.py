"""Builders: what makes the layers of an architecture. Records name them, `MODULE.FUNCTION`."""

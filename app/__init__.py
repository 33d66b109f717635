"""Application package: the entry points, the construction of the window, and controllers between engine and widgets."""

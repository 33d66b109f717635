"""Presenters of the library, the Find tab, the model panel and the welcome page."""

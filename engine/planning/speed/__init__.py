"""Prediction of the time per token: speeds of devices and links, work of a layout, and corrections from answers."""

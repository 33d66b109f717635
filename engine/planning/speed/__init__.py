"""Prediction of tokens per second: speeds of devices and links, work of each layer, learnt corrections."""

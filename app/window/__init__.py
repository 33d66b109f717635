"""The main window, and the presenters, which connect its widgets with the objects behind them."""

"""`Plan` and its values: the layout and settings of a model on a rig, with forecast, decided settings and advice."""

"""`Plan`: an edit (layout, settings, side files) of a model on a rig (the devices), and everything that is computed from it."""

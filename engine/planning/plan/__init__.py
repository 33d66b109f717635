"""`Plan`: an edit (layout, settings, side files) of a model on a rig (devices), with all values computed from it."""

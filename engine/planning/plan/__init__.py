"""`Plan`: an edit of a model on a rig (the devices of a load), and everything that is computed from it."""

"""What is to be loaded, as one value: an edit of a model on a rig, and all that follows from it."""

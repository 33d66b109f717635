"""The plan of a load as one value: an edit of a model on a rig, and everything that follows from it."""

"""Finding and checking devices: the searches that window and command line share."""

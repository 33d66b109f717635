"""What there is to place layers on, found and told apart: searches that the window and the command line share."""

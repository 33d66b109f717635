"""What `make.py` says of a set-up: what is missing, how long it takes, why a build failed. Standard library only."""

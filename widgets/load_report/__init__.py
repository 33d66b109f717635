"""What the last load allocated, or what did not fit."""

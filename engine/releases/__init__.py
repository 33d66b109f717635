"""What the publisher says of the newest version: asked for only where people want that, and believed only if signed."""

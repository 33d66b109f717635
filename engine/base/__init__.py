"""What every other package of the engine uses: errors, units, texts for people, files, limits of the system."""

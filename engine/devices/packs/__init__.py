"""Engine packs: folders with a backend of the engine, found beside the program and in the user's data folder."""

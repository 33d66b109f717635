"""Engine packs: folders with a backend library, next to the program and in the user's data folder."""

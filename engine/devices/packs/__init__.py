"""Engine packs: folders with a ggml backend library, in the program's folder or in the user's data folder."""

"""Engine packs: folders with a ggml backend library, in the program's folder and in the user's data folder."""

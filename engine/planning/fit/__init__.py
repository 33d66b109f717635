"""Finding a layout that fits: automatic ones, steps back, proposals, and what is learnt from loads for the next."""

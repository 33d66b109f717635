"""What is decided for people where they did not choose, each with a sentence of why: pure functions, one per topic."""

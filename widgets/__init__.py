"""Qt views and models: they show values and report what the user did."""

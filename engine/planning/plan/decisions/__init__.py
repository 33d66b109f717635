"""The values of settings that the user left on auto ("decisions"), each with a reason in one sentence."""

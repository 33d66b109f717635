"""The models that are open in the window, and what people do with them and their layouts."""

"""The settings bar: model, split mode, context and the load buttons."""

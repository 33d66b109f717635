"""The conversation with the loaded model."""

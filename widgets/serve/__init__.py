"""The panel of the API server: address, key, requests, and snippets to copy."""

"""The demo model: written by ourselves, nothing downloaded."""

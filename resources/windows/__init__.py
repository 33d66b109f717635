"""The application for Windows: installer and signing. Written from the manuals, untested."""

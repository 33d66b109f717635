"""The application for Windows: installer and signing. Written from the makers' manuals, not run yet."""

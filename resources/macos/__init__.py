"""The application for macOS: bundle, disk image, signing, notarisation. Written from Apple's manuals, untested."""

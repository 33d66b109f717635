"""Makes the application that needs no Python: a folder, a tarball and a Debian package."""

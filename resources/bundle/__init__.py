"""Builds the bundle, the application that needs no installed Python: a folder, a tarball and a Debian package."""

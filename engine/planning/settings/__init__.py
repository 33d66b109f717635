"""Settings of a load and of an answer, in tables from which files, command line, dialogs and docs take them."""

"""Settings of a load and of an answer, and the tables from which files, options, dialogs and pages are made."""

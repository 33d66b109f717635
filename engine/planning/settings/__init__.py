"""Settings of a load and of an answer, and the tables behind files, command line options, dialogs and docs."""

"""Tables of the settings of a load and of an answer. Files, the command line, dialogs and docs are made from them."""

"""Languages of the window: a catalogue for each, as translators' programs write them (PO files)."""

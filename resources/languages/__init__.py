"""Languages of the window: a catalogue (PO file, the format of translation programs) for each."""

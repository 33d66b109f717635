"""Settings of a load: the value, the table that their file form, options, dialog and page are made from."""

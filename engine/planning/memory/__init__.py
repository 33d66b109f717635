"""How many bytes a layout takes on each device."""

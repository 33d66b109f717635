"""The memory of a layout on each device, in bytes."""

"""The score: layers along the time axis, one stave per device."""

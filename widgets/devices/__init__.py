"""Cards with live memory graphs, one per device."""

"""What several widget packages share: palette, bars, text."""

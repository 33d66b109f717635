"""The comparison of layouts by measured speed: dialog and chart."""

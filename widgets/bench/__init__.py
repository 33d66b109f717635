"""The comparison of layouts by speed: dialog and chart."""

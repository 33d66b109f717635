"""Icons, stylesheets and desktop files."""

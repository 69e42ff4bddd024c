"""From pages to committed segments."""

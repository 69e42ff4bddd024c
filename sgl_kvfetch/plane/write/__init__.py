"""Write pages to a store as committed segments."""

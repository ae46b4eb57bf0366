"""Models of the paper that no library has."""

"""Facts of each architecture family: one row each."""

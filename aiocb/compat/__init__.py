"""Other libraries' interfaces over the same engine."""

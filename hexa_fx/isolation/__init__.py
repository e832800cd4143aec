"""Trial runs: a module's state saved and put back, everything that a call does observed, and calls compared in float64."""

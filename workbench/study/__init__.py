"""Studies: arms x seeds with one declared treatment, planned before any run."""

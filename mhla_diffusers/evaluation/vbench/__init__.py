"""VBench: what to generate, how to run it in its own environment, and its totals."""

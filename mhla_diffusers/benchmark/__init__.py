"""Time and memory, measured side by side in one run: ``mhla bench``."""

"""Choose and load a pipeline, call it, and save its samples."""

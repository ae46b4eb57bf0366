"""Find settings for a model, on the user's machine and prompts."""

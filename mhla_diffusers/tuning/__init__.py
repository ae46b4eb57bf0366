"""Find the settings that suit a model, on the user's machine with the user's prompts."""

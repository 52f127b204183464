"""Sample responses to prompts."""

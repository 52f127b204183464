"""The built-in task: posts, summaries and their judge."""

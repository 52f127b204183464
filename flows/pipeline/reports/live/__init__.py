"""Show a run while it goes on: a panel on the terminal, a page and cards."""

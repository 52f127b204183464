"""What a person sees while a run goes on: a panel on the terminal, a page and cards."""

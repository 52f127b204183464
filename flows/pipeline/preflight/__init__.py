"""Find the inputs of a run, and check them before anything is trained."""

"""Code that uses private parts of Metaflow: command line, errors, runtime and compiled jobs."""

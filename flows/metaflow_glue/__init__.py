"""Code that uses private parts of Metaflow: its command line, its errors, its compiled jobs."""

"""What touches private parts of Metaflow: its command line, its errors, its compiled jobs."""

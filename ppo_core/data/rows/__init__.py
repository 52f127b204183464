"""Read the rows of data sets, and convert all known forms of columns to one form."""

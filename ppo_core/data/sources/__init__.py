"""Files, folders, addresses and hub data sets, read as a stream of rows."""

"""The functions that the steps of the flows call, and the records that they exchange."""

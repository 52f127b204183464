"""Deploy the flows RLHF and Retrain to a scheduler, with the options of one deployment file."""

"""Deploy the flows RLHF and Retrain to a scheduler, as one deployment file describes."""

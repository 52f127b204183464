"""Start the flow RLHF if an input is new, limit it to one run at a time, and send alarms."""

"""Start the flow RLHF regularly: only if something is new, one run at a time, with alarms."""

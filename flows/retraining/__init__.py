"""Run the flow RLHF again and again: only if something is new, one run at a time, with alarms."""

"""Run scripts that were written for TRL: TRL's names, arguments and loops on our trainer."""

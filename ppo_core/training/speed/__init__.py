"""Measure how fast the processes of a training are on this machine."""

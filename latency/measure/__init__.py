"""Timing: a process for each candidate, taking turns, statistics, and the machine's facts."""

"""Timing: a process for each candidate, alternating turns, statistics, and facts about the machine."""

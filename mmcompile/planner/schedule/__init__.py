"""Schedules: the order of a step's actions on each rank, its simulated time, and idle time by cause."""

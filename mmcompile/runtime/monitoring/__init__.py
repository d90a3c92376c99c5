"""Measurements and status of a run: step metrics, timers, measured actions, and fail points for tests."""

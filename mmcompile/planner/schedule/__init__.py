"""Orders of a step, and what they take: schedules, the simulator, idle time by cause."""

"""Cost model: hardware, communication, memory and time of layers, and measured calibrations."""

"""One rank's part of a step: forwards, backwards and P2P messages, in the order of the schedule."""

"""Process groups, control messages, message tags, and sockets that can be closed under a blocked thread."""

"""Processes of a run: local workers, and the background process that balances samples."""

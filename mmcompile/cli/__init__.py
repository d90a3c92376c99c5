"""The command line: `mmcompile COMMAND`; `main` is its entry, `command_group` the table of its commands."""

"""The command line: one file a verb; spec in, report out, exit code."""

"""The command line: parses, calls the stages, and is the only package that prints."""

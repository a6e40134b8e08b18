"""What everything stands on: checks, files, attention, layers, examples, matching, conversion."""

"""Studies of speculation on one pair: a table, a figure and its numbers each. `python -m bench.studies`."""

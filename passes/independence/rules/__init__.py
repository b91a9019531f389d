"""Where each op of torch leaves the samples of its inputs: one small rule per op, which fills `table.py`."""

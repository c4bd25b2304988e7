"""Commands of `qwen-edit-zero` that have a page of options of their own; the others are in `cli.py`."""

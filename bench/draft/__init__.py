"""The parts of ``bench/train_draft.py``: prompts, the target's own text, the draft, its training and its files."""

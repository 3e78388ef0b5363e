"""The parts of ``bench/train_demo_pair.py``: corpus, tokenizer, model and optimizer of the packaged pair."""

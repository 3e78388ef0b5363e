"""Models: configs, weights, tokenizers, chat templates and the forward pass over ops."""

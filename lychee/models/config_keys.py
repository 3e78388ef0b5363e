"""The keys of config.json that every family knows: read, harmless, or to be left at a value that changes nothing."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def keys(*lines: str) -> frozenset[str]:
    """The words of the lines."""
    return frozenset(" ".join(lines).split())


READ = keys(
    "architectures model_type vocab_size hidden_size intermediate_size num_hidden_layers num_attention_heads",
    "num_key_value_heads head_dim max_position_embeddings original_max_position_embeddings rms_norm_eps",
    "rope_theta rope_scaling rope_parameters tie_word_embeddings eos_token_id dtype torch_dtype lychee_draft",
    "quantization_config",
)

# Keys of features that are not implemented, with the values, besides null, that leave them off.
NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "hidden_act": ("silu", "swish"),
    "partial_rotary_factor": (1,),
    "rope_interleaved": (False,),
    "use_mrope": (False,),
    "attention_bias": (False,),
    "mlp_bias": (False,),
    "sliding_window": (),
    "use_sliding_window": (False,),
    "attn_logit_softcapping": (),
    "final_logit_softcapping": (),
    "qk_norm": (False,),
    "use_qk_norm": (False,),
    "is_encoder_decoder": (False,),
    "tie_encoder_decoder": (False,),
    "add_cross_attention": (False,),
    "cross_attention_hidden_size": (),
    "pruned_heads": ({},),
}

# Keys that say nothing about the forward pass.
HARMLESS = keys(
    # training, and how the file was written; pretraining_tp only splits the sums of the same products
    "transformers_version initializer_range attention_dropout use_cache pretraining_tp name_or_path torchscript",
    "use_bfloat16 tf_legacy_loss attn_implementation is_llama_config transformers.js_config unsloth_fixed",
    "unsloth_version",
    "auto_map",  # names code beside the checkpoint, which is never run
    # tokens and lengths that the tokenizer or the position table decide
    "bos_token_id pad_token_id sep_token_id unk_token_id decoder_start_token_id tokenizer_class prefix",
    "model_max_length tokenizer_model_max_length max_sequence_length max_window_layers",
    # what transformers' models return, and tasks other than generation
    "output_attentions output_hidden_states output_scores return_dict return_dict_in_generate is_decoder",
    "chunk_size_feed_forward id2label label2id num_labels problem_type finetuning_task task_specific_params",
    # defaults of sampling, which a request gives here
    "do_sample temperature top_k top_p typical_p repetition_penalty length_penalty diversity_penalty num_beams",
    "num_beam_groups num_return_sequences early_stopping max_length min_length max_new_tokens",
    "no_repeat_ngram_size encoder_no_repeat_ngram_size bad_words_ids remove_invalid_values",
    "exponential_decay_length_penalty forced_bos_token_id forced_eos_token_id suppress_tokens",
    "begin_suppress_tokens",
)

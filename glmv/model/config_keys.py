"""Keys of a config.json that say nothing about the architecture, and what is said of one that nobody knows.

A key that is neither read nor listed here is refused: transformers keeps any key it is given, so that a misspelt or
foreign setting would otherwise be carried along and never take effect.
"""

from collections.abc import Collection, Iterable, Mapping
from difflib import get_close_matches
from typing import Any


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


# What transformers' base class writes into any config, and what concerns files, labels or generated text only.
BOOKKEEPING = _names(
    "_name_or_path architectures auto_map dtype torch_dtype transformers_version return_dict output_attentions "
    "output_hidden_states output_scores problem_type id2label label2id chunk_size_feed_forward torchscript "
    "use_bfloat16 tf_legacy_loss is_encoder_decoder is_decoder add_cross_attention cross_attention_hidden_size "
    "tie_encoder_decoder pruned_heads finetuning_task task_specific_params tokenizer_class prefix "
    "attn_implementation _attn_implementation _attn_implementation_autoset _attn_implementation_internal "
    "experts_implementation _experts_implementation _experts_implementation_internal "
    "bos_token_id eos_token_id pad_token_id sep_token_id decoder_start_token_id max_length min_length do_sample "
    "early_stopping num_beams num_beam_groups diversity_penalty temperature top_k top_p typical_p repetition_penalty "
    "length_penalty no_repeat_ngram_size encoder_no_repeat_ngram_size bad_words_ids num_return_sequences "
    "return_dict_in_generate forced_bos_token_id forced_eos_token_id remove_invalid_values "
    "exponential_decay_length_penalty suppress_tokens begin_suppress_tokens"
)
# Settings of the two parts that leave their computation in training as it is.
WITHOUT_EFFECT = _names(
    "initializer_range max_position_embeddings use_cache tie_word_embeddings output_router_logits "
    "router_aux_loss_coef num_nextn_predict_layers image_token_id video_token_id image_start_token_id "
    "image_end_token_id video_start_token_id video_end_token_id"
)
ROPE = frozenset({"rope_type", "type", "rope_theta", "partial_rotary_factor", "mrope_section"})


def unknown_key(values: Mapping[str, Any], known: Collection[str], tolerated: Iterable[str] = ()) -> str | None:
    """What to say of the first key of `values` that is neither known nor tolerated; None if there is none.

    A key whose value is null sets nothing and is passed over.
    """
    passed = {*known, *tolerated}
    for key, value in values.items():
        if key not in passed and value is not None:
            near = get_close_matches(key, sorted(known), n=1)
            guess = f"Did you mean {near[0]}? " if near else ""
            return (
                f"{key} = {value!r} is not a known key, and would have no effect here. "
                f"{guess}Take it out if the model is the same without it"
            )
    return None

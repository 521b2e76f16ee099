"""The tiny model's tokenizer: byte-level BPE learnt from `corpus.txt`, with GLM's special tokens as single ids."""

from __future__ import annotations

from importlib import resources
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers

# GLM's order. The last three are ordinary text to a decoder that skips special tokens, as in the published files.
SPECIAL_TOKENS = (
    "<|endoftext|>",
    "[MASK]",
    "[gMASK]",
    "[sMASK]",
    "<sop>",
    "<eop>",
    "<|system|>",
    "<|user|>",
    "<|assistant|>",
    "<|observation|>",
    "<|begin_of_image|>",
    "<|end_of_image|>",
    "<|begin_of_video|>",
    "<|end_of_video|>",
    "<|image|>",
    "<|video|>",
)
TEXT_TOKENS = ("/nothink", "<think>", "</think>")
LEARNT_TOKENS = 581  # with the special tokens 600 ids; the model's vocabulary is padded beyond them

_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def train_tokenizer() -> Tokenizer:
    """Learn the vocabulary; the same corpus gives the same ids on every machine."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_WORDS), behavior="isolated", invert=False),
            pre_tokenizers.ByteLevel(add_prefix_space=False, trim_offsets=True, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    trainer = trainers.BpeTrainer(
        vocab_size=LEARNT_TOKENS,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    lines = resources.files("glmv.tiny").joinpath("corpus.txt").read_text(encoding="utf-8").splitlines()
    tokenizer.train_from_iterator(lines, trainer)
    tokenizer.add_tokens([_added(token) for token in SPECIAL_TOKENS + TEXT_TOKENS])
    return tokenizer


def special_token_ids(tokenizer: Tokenizer) -> dict[str, int]:
    """Map every special token to its id."""
    vocabulary = tokenizer.get_vocab(with_added_tokens=True)
    return {token: vocabulary[token] for token in SPECIAL_TOKENS + TEXT_TOKENS}


def tokenizer_config(tokenizer: Tokenizer) -> dict[str, Any]:
    """Build tokenizer_config.json."""
    ids = special_token_ids(tokenizer)
    return {
        "added_tokens_decoder": {str(index): _as_json(token) for token, index in ids.items()},
        "additional_special_tokens": list(SPECIAL_TOKENS),
        "clean_up_tokenization_spaces": False,
        "do_lower_case": False,
        "eos_token": "<|endoftext|>",
        "extra_special_tokens": {},
        "model_max_length": 65536,
        "pad_token": "<|endoftext|>",
        "padding_side": "left",
        "processor_class": "Glm4vProcessor",
        "remove_space": False,
        "tokenizer_class": "PreTrainedTokenizerFast",
    }


def _added(token: str) -> AddedToken:
    return AddedToken(**_as_json(token))


def _as_json(token: str) -> dict[str, Any]:
    return {
        "content": token,
        "lstrip": False,
        "normalized": False,
        "rstrip": False,
        "single_word": False,
        "special": token in SPECIAL_TOKENS,
    }

"""A Hugging Face model folder of half a megabyte: random weights and a small tokenizer, the same ones every time.

python tests/swift/cpu/tiny_model.py FOLDER LAYERS
"""

import os
import sys
from typing import Any, Final

SPECIAL_TOKENS: Final = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
VOCABULARY: Final = 400  # at most; what the few words below give
EMBEDDINGS: Final = 512  # more than the vocabulary, and divisible by the tensor parallel sizes of the tests
CHAT_TEMPLATE: Final = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
WORDS: Final = (
    "You are a helpful assistant.",
    "system user assistant",
    "the quick brown fox jumps over the lazy dog",
    "what is the sum of one and two",
    "the answer is three",
    "hello world 0 1 2 3 4 5 6 7 8 9",
    "chunk row rank sample question answer",
)


def make_tokenizer() -> Any:
    """A byte-level BPE tokenizer: every text can be encoded, and decoding gives it back."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(list(WORDS) * 4, trainer)
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        additional_special_tokens=["<|im_start|>", "<|im_end|>"],
        model_max_length=2048,
    )
    wrapped.chat_template = CHAT_TEMPLATE
    return wrapped


def make_model(layers: int, tokenizer: Any) -> Any:
    import torch
    import transformers

    config = transformers.Qwen3Config(
        vocab_size=EMBEDDINGS,
        hidden_size=64,
        head_dim=16,
        intermediate_size=128,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=2048,
        tie_word_embeddings=False,
        use_cache=False,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    torch.manual_seed(0)
    return transformers.Qwen3ForCausalLM(config).to(torch.float32)


def main(folder: str, layers: str) -> None:
    os.makedirs(folder, exist_ok=True)
    tokenizer = make_tokenizer()
    tokenizer.save_pretrained(folder)
    make_model(int(layers), tokenizer).save_pretrained(folder)


if __name__ == "__main__":
    main(*sys.argv[1:])

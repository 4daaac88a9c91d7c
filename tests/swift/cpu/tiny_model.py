"""Hugging Face model folders with random weights, the same ones every time.

python tests/swift/cpu/tiny_model.py FOLDER LAYERS|vision|audio

LAYERS: half a megabyte with a small tokenizer. vision: a Qwen2-VL of 20 megabytes with its real processor; nearly all
of it is an embedding of the size of Qwen2-VL's, as its template in ms-swift has the numbers of its tokens. audio: a
Qwen2-Audio that hears one second, not thirty.
"""

import json
import os
import sys
from typing import Any, Final

SPECIAL_TOKENS: Final = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
VOCABULARY: Final = 400  # at most; what the few words below give
EMBEDDINGS: Final = 512  # more than the vocabulary, and divisible by the tensor parallel sizes of the tests
VISION_TOKENS: Final = {
    **{"<|vision_start|>": 151652, "<|vision_end|>": 151653, "<|vision_pad|>": 151654},
    **{"<|image_pad|>": 151655, "<|video_pad|>": 151656},
}
VISION_EMBEDDINGS: Final = 151_664
SMALL: Final = {
    **{"hidden_size": 32, "intermediate_size": 64},
    **{"num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2},
}
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
    return tokenizer


def wrapped(tokenizer: Any, *special: str) -> Any:
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        additional_special_tokens=["<|im_start|>", "<|im_end|>", *special],
        model_max_length=2048,
        chat_template=CHAT_TEMPLATE,
    )


def of_tokenizer(tokenizer: Any) -> dict[str, Any]:
    ids = {"bos_token_id": None, "eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    return {"max_position_embeddings": 2048, **ids}


def text_model(layers: int) -> tuple[Any, Any]:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    tokenizer = wrapped(make_tokenizer())
    config = Qwen3Config(
        vocab_size=EMBEDDINGS,
        hidden_size=64,
        head_dim=16,
        intermediate_size=128,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=False,
        use_cache=False,
        **of_tokenizer(tokenizer),
    )
    return tokenizer, Qwen3ForCausalLM(config)


def vision_model() -> tuple[Any, Any]:
    import transformers
    from tokenizers import Tokenizer

    rules = json.loads(make_tokenizer().to_str())
    rules["model"]["vocab"].update(VISION_TOKENS)
    tokenizer = wrapped(Tokenizer.from_str(json.dumps(rules)), *VISION_TOKENS)
    images, videos = transformers.Qwen2VLImageProcessor(), transformers.Qwen2VLVideoProcessor()
    processor = transformers.Qwen2VLProcessor(images, tokenizer, videos, chat_template=CHAT_TEMPLATE)
    text = {
        "vocab_size": VISION_EMBEDDINGS,
        **SMALL,
        "rope_parameters": {"rope_type": "default", "mrope_section": [2, 3, 3], "rope_theta": 10000.0},
        "tie_word_embeddings": True,
        **of_tokenizer(tokenizer),
    }
    vision = {"depth": 1, "embed_dim": 32, "hidden_size": 32, "num_heads": 2, "mlp_ratio": 2}
    config = transformers.Qwen2VLConfig(text_config=text, vision_config=vision, tie_word_embeddings=True)
    return processor, transformers.Qwen2VLForConditionalGeneration(config)


def audio_model() -> tuple[Any, Any]:
    import transformers

    tokenizer = wrapped(make_tokenizer(), "<|AUDIO|>", "<|audio_bos|>", "<|audio_eos|>")
    sounds = transformers.WhisperFeatureExtractor(feature_size=16, chunk_length=1)
    processor = transformers.Qwen2AudioProcessor(sounds, tokenizer, chat_template=CHAT_TEMPLATE)
    text = {"vocab_size": EMBEDDINGS, **SMALL, **of_tokenizer(tokenizer)}
    heard = {"num_mel_bins": 16, "max_source_positions": 50, "d_model": 32}
    layers = {"encoder_layers": 1, "encoder_attention_heads": 2, "encoder_ffn_dim": 64}
    # The model reads the last of them, as the published ones have it.
    ids = {"audio_token_index": processor.audio_token_id, "pad_token_id": tokenizer.pad_token_id, "ignore_index": -100}
    config = transformers.Qwen2AudioConfig(audio_config=heard | layers, text_config=text, **ids)
    return processor, transformers.Qwen2AudioForConditionalGeneration(config)


def main(folder: str, kind: str) -> None:
    import torch

    os.makedirs(folder, exist_ok=True)
    torch.manual_seed(0)
    multimodal = {"vision": vision_model, "audio": audio_model}
    tokenizer, model = multimodal[kind]() if kind in multimodal else text_model(int(kind))
    tokenizer.save_pretrained(folder)
    model.to(torch.float32).save_pretrained(folder)


if __name__ == "__main__":
    main(*sys.argv[1:])

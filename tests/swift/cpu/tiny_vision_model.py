"""A Qwen2-VL model folder of 20 megabytes: random weights, its real processor, the tokenizer of `tiny_model.py`.

python tests/swift/cpu/tiny_vision_model.py FOLDER

Nearly all of it is an embedding of the size of Qwen2-VL's: its template in ms-swift has the numbers of its tokens.
"""

import json
import sys
from typing import Any, Final

from tests.swift.cpu.tiny_model import CHAT_TEMPLATE, make_tokenizer

NUMBERS: Final = {
    **{"<|vision_start|>": 151652, "<|vision_end|>": 151653, "<|vision_pad|>": 151654},
    **{"<|image_pad|>": 151655, "<|video_pad|>": 151656},
}
EMBEDDINGS: Final = 151_664


def make_processor() -> Any:
    import transformers
    from tokenizers import Tokenizer

    rules = json.loads(make_tokenizer().backend_tokenizer.to_str())
    rules["model"]["vocab"].update(NUMBERS)
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(json.dumps(rules)),
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        additional_special_tokens=["<|im_start|>", "<|im_end|>", *NUMBERS],
        model_max_length=2048,
    )
    images, videos = transformers.Qwen2VLImageProcessor(), transformers.Qwen2VLVideoProcessor()
    return transformers.Qwen2VLProcessor(images, tokenizer, videos, chat_template=CHAT_TEMPLATE)


def make_model(tokenizer: Any) -> Any:
    import torch
    import transformers

    text = {
        "vocab_size": EMBEDDINGS,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "max_position_embeddings": 2048,
        "rope_parameters": {"rope_type": "default", "mrope_section": [2, 3, 3], "rope_theta": 10000.0},
        "tie_word_embeddings": True,
        "bos_token_id": None,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }
    vision = {"depth": 1, "embed_dim": 32, "hidden_size": 32, "num_heads": 2, "mlp_ratio": 2}
    config = transformers.Qwen2VLConfig(text_config=text, vision_config=vision, tie_word_embeddings=True)
    torch.manual_seed(0)
    return transformers.Qwen2VLForConditionalGeneration(config).to(torch.float32)


def main(folder: str) -> None:
    processor = make_processor()
    processor.save_pretrained(folder)
    make_model(processor.tokenizer).save_pretrained(folder)


if __name__ == "__main__":
    main(*sys.argv[1:])

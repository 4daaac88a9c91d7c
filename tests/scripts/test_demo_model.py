"""From rows to a batch of the demo's model."""

import torch

from scripts.demonstration.demo_model import CONTEXT, ByteModel, collate, encode


def test_a_batch_is_padded_and_its_targets_are_the_next_bytes() -> None:
    batch = collate([{"id": 4, "input_ids": [1, 2, 3, 4]}, {"id": 7, "input_ids": [5, 6]}])
    assert batch.ids == [4, 7]
    assert batch.inputs.tolist() == [[1, 2, 3], [5, 6, 256]]
    assert batch.targets.tolist() == [[2, 3, 4], [6, -100, -100]]


def test_a_long_conversation_is_cut_to_what_the_model_takes() -> None:
    sample = encode({"id": 1, "messages": [{"role": "user", "content": "a" * 1000}]})
    assert bytes(sample["input_ids"]) == b"[user]\n" + b"a" * (CONTEXT + 1 - 7)
    batch = collate([sample])
    assert ByteModel()(batch.inputs, batch.targets).isfinite()


def test_the_model_looks_at_no_later_byte() -> None:
    torch.manual_seed(0)
    model = ByteModel()
    inputs = torch.tensor([[1, 2, 3, 4]])
    ignored = torch.tensor([[2, -100, -100, -100]])
    later = torch.tensor([[1, 9, 9, 9]])
    assert torch.allclose(model(inputs, ignored), model(later, ignored))

"""PEFT and TRL take the Hugging Face form, gates included."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")
peft = pytest.importorskip("peft")

from tiny_hugging_face import tiny_pair, tiny_settings, token_ids  # noqa: E402

from gatelab.interop.huggingface import GateLabConfig, GateLabForCausalLM, register, to_decoder  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")
TARGETS = ["q_proj", "v_proj", "sdpa_output.projection"]
CHANGED = {
    f"model.layers.{layer}.self_attn.{name}.weight"
    for layer in (0, 1)
    for name in ("q_proj", "v_proj", "gates.sdpa_output.projection")
}


def train_two_steps(model: Any) -> None:
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    for step in range(2):
        optimizer.zero_grad()
        model(token_ids(seed=step), labels=token_ids(seed=step)).loss.backward()
        optimizer.step()


@pytest.mark.parametrize("checkpointed", [False, True])
def test_lora_on_query_value_and_gate_merges_exactly(checkpointed: bool) -> None:
    decoder, model = tiny_pair("elementwise")
    before, original = copy.deepcopy(decoder.state_dict()), decoder(token_ids())
    if checkpointed:
        model.activation_checkpointing_enable()
    lora = peft.LoraConfig(r=3, lora_alpha=8, target_modules=TARGETS, task_type="CAUSAL_LM")
    adapted = peft.get_peft_model(model, lora)
    trained = {name for name, parameter in adapted.named_parameters() if parameter.requires_grad}
    assert len(trained) == 2 * len(TARGETS) * decoder.settings.num_layers
    gate = adapted.get_submodule("base_model.model.model.layers.0.self_attn.gates.sdpa_output.projection")
    assert gate.lora_B["default"].weight.shape == (48, 3)
    adapted.train()
    train_two_steps(adapted)
    adapted.eval()
    expected = adapted(token_ids()).logits
    assert (expected - original).abs().max() > 0.01
    assert gate.lora_B["default"].weight.abs().max() > 0
    merged = adapted.merge_and_unload()
    assert isinstance(merged, GateLabForCausalLM)
    torch.testing.assert_close(merged(token_ids()).logits, expected, atol=2e-5, rtol=0)
    torch.testing.assert_close(to_decoder(merged)(token_ids()), expected, atol=2e-5, rtol=0)
    changed = {name for name, tensor in merged.state_dict().items() if not torch.equal(tensor, before[name])}
    assert changed == CHANGED


def test_an_adapter_is_saved_and_found_again(tmp_path: Path) -> None:
    register()
    _, model = tiny_pair("elementwise")
    model.save_pretrained(tmp_path / "base")
    adapted = peft.get_peft_model(model, peft.LoraConfig(r=3, target_modules=TARGETS, init_lora_weights=False))
    adapted.save_pretrained(tmp_path / "adapter")
    base = GateLabForCausalLM.from_pretrained(tmp_path / "base")
    again = peft.PeftModel.from_pretrained(base, tmp_path / "adapter").eval()
    torch.testing.assert_close(again(token_ids()).logits, adapted.eval()(token_ids()).logits, atol=2e-5, rtol=0)


def word_tokenizer() -> Any:
    """A tokenizer of whole words, with padding and end tokens."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Whitespace
    from transformers import PreTrainedTokenizerFast

    vocabulary = {"<pad>": 0, "<eos>": 1, "<unk>": 2} | {f"w{number}": number + 3 for number in range(90)}
    tokenizer = Tokenizer(WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>")


def test_sft_trains_every_parameter_for_two_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trl = pytest.importorskip("trl")
    datasets = pytest.importorskip("datasets")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    torch.manual_seed(0)
    config = GateLabConfig.from_settings(tiny_settings(), pad_token_id=0, eos_token_id=1)
    model = GateLabForCausalLM(config)
    before = copy.deepcopy(model.state_dict())
    rows = [{"text": " ".join(f"w{(row * 7 + word) % 90}" for word in range(5 + row))} for row in range(8)]
    arguments = trl.SFTConfig(
        output_dir=str(tmp_path), max_steps=2, per_device_train_batch_size=3, learning_rate=1e-2, report_to="none",
        save_strategy="no", use_cpu=True, logging_steps=1, bf16=False, max_length=16, disable_tqdm=True,
        gradient_checkpointing=True, dataloader_pin_memory=False,
    )  # fmt: skip
    trainer = trl.SFTTrainer(
        model=model, args=arguments, train_dataset=datasets.Dataset.from_list(rows), processing_class=word_tokenizer()
    )
    result = trainer.train()
    assert result.global_step == 2
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert len(losses) == 2 and all(0 < loss < 10 for loss in losses)
    assert all(not torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    trainer.save_model(str(tmp_path / "saved"))
    assert (tmp_path / "saved" / "model.safetensors").exists()
    assert "gated-attention" in (tmp_path / "saved" / "README.md").read_text()

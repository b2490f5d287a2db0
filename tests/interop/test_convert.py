"""What a conversion writes loads where it should and computes the same; what can't be expressed is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from tiny_checkpoints import saved, token_ids, transformers
from torch import Tensor

import gatelab.interop
from gatelab.gates.spec import GateSpec
from gatelab.interop import convert, load
from gatelab.interop.families import Checkpoint
from gatelab.interop.loading import open_checkpoint
from gatelab.interop.streaming import streamed_logits
from gatelab.interop.targets import To
from gatelab.interop.tensor_files import INDEX, open_tensors
from gatelab.model.decoder import Decoder
from gatelab.model.settings import LayerSettings, MixtureSettings, ModelSettings, RopeSettings

GOLDEN = Path(__file__).parent.parent / "golden" / "official"
GATE = {"elementwise": GateSpec(), "headwise": GateSpec(granularity="headwise")}
EXPERTS = MixtureSettings(num_experts=5, experts_per_token=2, expert_width=24)


def settings(**changes: Any) -> ModelSettings:
    """A tiny model with grouped heads."""
    return ModelSettings(
        **{
            "vocab_size": 97, "width": 40, "num_layers": 2, "num_heads": 6, "num_kv_heads": 2, "head_size": 8,
            "feedforward_width": 56, "max_context": 64, "rope": RopeSettings(base=500.0), **changes,
        }
    )  # fmt: skip


def checkpoint(folder: Path, dtype: torch.dtype = torch.float32, **changes: Any) -> Path:
    """A checkpoint of ours as training writes it, without manifest and optimizer, with random weights."""
    decoder = Decoder(settings(**changes))
    generator = torch.Generator().manual_seed(0)
    state = {}
    for name, tensor in decoder.state_dict().items():
        noise = 0.2 * torch.randn(tensor.shape, generator=generator)
        state[name] = (1 + noise if "norm" in name and not decoder.settings.centred_norms else noise).to(dtype)
    folder.mkdir(parents=True)
    metadata = {"format": "pt", "gate_layout": "L1", "model": decoder.settings.model_dump_json()}
    save_file(state, folder / "model.safetensors", metadata)
    return folder


MODELS: dict[str, tuple[To, str, dict[str, Any]]] = {
    "gate": ("qwen3_next", "Qwen3NextForCausalLM", {"gates": (GateSpec(),)}),
    "gate, untied": ("qwen3_next", "Qwen3NextForCausalLM", {"gates": (GateSpec(),), "tied_head": False}),
    "gate, MHA": ("qwen3_next", "Qwen3NextForCausalLM", {"gates": (GateSpec(),), "num_kv_heads": 6}),
    "gate, MQA": ("qwen3_next", "Qwen3NextForCausalLM", {"gates": (GateSpec(),), "num_kv_heads": 1}),
    "gate, centred": ("qwen3_next", "Qwen3NextForCausalLM", {"gates": (GateSpec(),), "centred_norms": True}),
    "gate, a quarter rotates": ("qwen3_next", "Qwen3NextForCausalLM", {
        "gates": (GateSpec(),), "rope": RopeSettings(base=500.0, fraction=0.25),
    }),
    "gate, biases": ("qwen3_next", "Qwen3NextForCausalLM", {
        "gates": (GateSpec(bias=0.0),), "biased_projections": ("q", "k", "v", "o"),
    }),
    "gate, experts": ("qwen3_next", "Qwen3NextForCausalLM", {
        "gates": (GateSpec(),), "mixture": EXPERTS.model_copy(update={"shared_width": 20, "shared_gate": True}),
        "layers": (LayerSettings(mixture=False), LayerSettings()),
    }),
    "no gate": ("qwen3", "Qwen3ForCausalLM", {}),
    "no gate, untied": ("qwen3", "Qwen3ForCausalLM", {"tied_head": False}),
    "no gate, centred": ("qwen3", "Qwen3ForCausalLM", {"centred_norms": True}),
    "no gate, windows": ("qwen3", "Qwen3ForCausalLM", {"layers": (LayerSettings(window=7), LayerSettings())}),
    "no gate, experts": ("qwen3", "Qwen3MoeForCausalLM", {"mixture": EXPERTS}),
    "no gate, some experts": ("qwen3", "Qwen3MoeForCausalLM", {
        "mixture": EXPERTS.model_copy(update={"renormalize": False}),
        "layers": (LayerSettings(), LayerSettings(mixture=False)),
    }),
}  # fmt: skip


@pytest.mark.parametrize("shard_bytes", [5_000_000, 20_000], ids=["one file", "shards"])
@pytest.mark.parametrize("model", list(MODELS))
@torch.no_grad()
def test_stock_classes_of_transformers_compute_the_same(model: str, shard_bytes: int, tmp_path: Path) -> None:
    to, class_name, changes = MODELS[model]
    source = checkpoint(tmp_path / "source", **changes)
    conversion = convert(source, tmp_path / "result", to, max_shard_bytes=shard_bytes)
    assert (tmp_path / "result" / INDEX).exists() == (shard_bytes < 5_000_000)
    theirs, report = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "result", output_loading_info=True)
    assert type(theirs).__name__ == class_name
    assert not any(report[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    expected = load(source)(token_ids())
    assert expected.std() > 0.5
    torch.testing.assert_close(theirs.eval()(token_ids()).logits, expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(load(tmp_path / "result")(token_ids()), expected, rtol=1e-5, atol=1e-5)
    assert conversion.error < 1e-5 < conversion.largest_logit
    assert conversion.source_layout == "L1"
    assert conversion.target_layout == ("L2" if to == "qwen3_next" else "L1")


@pytest.mark.parametrize("kind", ["elementwise", "headwise"])
@pytest.mark.parametrize("shard_bytes", [5_000_000, 20_000], ids=["one file", "shards"])
def test_every_chain_of_forms_ends_in_the_same_bits(kind: str, shard_bytes: int, tmp_path: Path) -> None:
    """The paper's checkpoint through ours, Megatron's, ours, and back in its own layout."""
    folder, forms = GOLDEN / kind, ["gatelab", "megatron", "official", "megatron", "gatelab", "official"]
    layouts = {"gatelab": "L1", "official": "L3", "megatron": "L4" if kind == "elementwise" else "L5"}
    for number, form in enumerate(forms):
        conversion = convert(folder, tmp_path / str(number), cast(To, form), max_shard_bytes=shard_bytes)
        assert conversion.error == 0
        assert conversion.target_layout == layouts[form]
        folder = tmp_path / str(number)
    first, last = open_tensors(GOLDEN / kind), open_tensors(folder)
    assert set(first) == set(last)
    assert all(torch.equal(first[name], last[name]) for name in first)
    assert last.metadata == {"format": "pt", "gate_layout": "L3"}


def test_megatrons_rows_and_names(tmp_path: Path) -> None:
    """Group by group: 3 heads of 8 query rows, 3 of 8 gate rows, 8 key rows, 8 value rows; SwiGLU's gate first."""
    source = checkpoint(tmp_path / "source", gates=(GateSpec(),), tied_head=False)
    convert(source, tmp_path / "result", "megatron")
    ours, theirs = open_checkpoint(source).tensors, open_tensors(tmp_path / "result")
    attention = "model.layers.1.self_attn."
    q, k, v = (ours[f"{attention}{name}_proj.weight"] for name in "qkv")
    gate = ours[f"{attention}gates.sdpa_output.projection.weight"]
    rows = [part for group in (0, 1) for part in (
        q[24 * group : 24 * group + 24], gate[24 * group : 24 * group + 24],
        k[8 * group : 8 * group + 8], v[8 * group : 8 * group + 8],
    )]  # fmt: skip
    assert torch.equal(theirs["decoder.layers.1.self_attention.linear_qkv.weight"], torch.cat(rows))
    mlp = [ours[f"model.layers.0.mlp.{name}_proj.weight"] for name in ("gate", "up")]
    assert torch.equal(theirs["decoder.layers.0.mlp.linear_fc1.weight"], torch.cat(mlp))
    assert {name for name in theirs if ".layers.0." not in name and ".layers.1." not in name} == {
        "embedding.word_embeddings.weight", "decoder.final_layernorm.weight", "output_layer.weight",
    }  # fmt: skip
    assert {name.removeprefix("decoder.layers.0.") for name in theirs if ".layers.0." in name} == {
        "self_attention.linear_qkv.layer_norm_weight", "self_attention.linear_qkv.weight",
        "self_attention.linear_proj.weight", "self_attention.q_layernorm.weight", "self_attention.k_layernorm.weight",
        "mlp.linear_fc1.layer_norm_weight", "mlp.linear_fc1.weight", "mlp.linear_fc2.weight",
    }  # fmt: skip


def test_headwise_gates_become_elementwise_only_on_request(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"its gate is headwise, qwen3_next has an elementwise one \(--expand makes"):
        convert(GOLDEN / "headwise", tmp_path / "result", "qwen3_next")
    convert(GOLDEN / "headwise", tmp_path / "result", "qwen3_next", expand=True)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "result").eval()
    with torch.no_grad():
        expected = load(GOLDEN / "headwise")(token_ids())
        torch.testing.assert_close(theirs(token_ids()).logits, expected, rtol=1e-5, atol=1e-5)
    with pytest.raises(ValueError, match="the model has no headwise gate on the attention output to expand"):
        convert(GOLDEN / "elementwise", tmp_path / "other", "official", expand=True)


REFUSED: dict[str, tuple[To, dict[str, Any], str]] = {
    "silu": ("qwen3_next", {"gates": (GateSpec(activation="silu"),)}, "its gate has activation=silu, qwen3_next only"),
    "another place": ("official", {"gates": (GateSpec(position="value"),)}, "position=value, official only sdpa_out"),
    "two gates": (
        "megatron", {"gates": (GateSpec(), GateSpec(position="value"))}, "position=value, megatron only sdpa_output",
    ),
    "some layers": ("qwen3_next", {"gates": (GateSpec(layers=(0,)),)}, "layers=(0,), qwen3_next only None"),
    "shared": ("official", {"gates": (GateSpec(sharing="head_shared"),)}, "sharing=head_shared, official only head_sp"),
    "no gate": ("qwen3_next", {}, "it has no gate on the attention output"),
    "no gate for Megatron": ("megatron", {}, "it has no gate on the attention output"),
    "a gate": ("qwen3", {"gates": (GateSpec(),)}, "it has gates, and the architecture has none"),
    "one bias": (
        "qwen3_next", {"gates": (GateSpec(bias=0.0),)}, "of its queries and its gate only one has a bias",
    ),
    "some biases": (
        "qwen3", {"biased_projections": ("q", "k", "v")}, "its projections k, q, v have biases, qwen3 has none of just",
    ),
    "no q/k norm": ("qwen3", {"qk_norm": False}, "it has no q/k norm"),
    "sandwich norms": ("qwen3", {"sandwich_norm": True}, "it has sandwich norms"),
    "a control": ("qwen3", {"control": {"operation": "silu"}}, "it has the control silu on the attention output"),
    "an embedding scale": ("qwen3", {"embedding_scale": 2.0}, "it scales the embedding by 2"),
    "partial rotation": ("qwen3", {"rope": {"fraction": 0.5}}, "only a share of 0.5 of each head's channels rotates"),
    "heads": ("qwen3", {"layers": ({"num_heads": 4}, {})}, "its layers differ in their number of heads"),
    "no rotation": ("qwen3", {"layers": ({"rotary": False}, {})}, "its layers differ in their rotation"),
    "windows": ("official", {"layers": ({"window": 7}, {})}, "it has layers with a window of 7"),
    "two windows": ("qwen3", {"layers": ({"window": 7}, {"window": 9})}, "it has layers with a window of 7, 9"),
    "experts": ("official", {"mixture": EXPERTS}, "written as official are dense models alone"),
    "a sigmoid router": (
        "qwen3", {"mixture": EXPERTS.model_copy(update={"router": "sigmoid"})}, "its router is not a plain softmax",
    ),
    "a sink": ("qwen3", {"sink": {"kind": "off_by_one"}}, "its attention has the sink off_by_one"),
    "a sink in our own form": (
        "gatelab", {"sink": {"kind": "learned_logit"}}, "its attention has the sink learned_logit",
    ),
    "not causal": ("official", {"causal": False}, "it is not causal"),
    "two reasons": ("qwen3", {"qk_norm": False, "sandwich_norm": True}, "it has sandwich norms; it has no q/k norm"),
}  # fmt: skip


@pytest.mark.parametrize("case", list(REFUSED))
def test_what_a_target_can_not_express(case: str, tmp_path: Path) -> None:
    to, changes, message = REFUSED[case]
    source = checkpoint(tmp_path / "source", **changes)
    with pytest.raises(ValueError) as error:
        convert(source, tmp_path / "result", to)
    assert str(error.value).startswith(f"this model can't be written as {to}: ")
    assert message in str(error.value)
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


@pytest.mark.parametrize("to", ["qwen3_next", "official", "megatron", "gatelab"])
def test_the_dtype_is_kept(to: To, tmp_path: Path) -> None:
    source = checkpoint(tmp_path / "source", torch.bfloat16, gates=(GateSpec(),))
    conversion = convert(source, tmp_path / "result", to)
    files = open_tensors(tmp_path / "result")
    assert {files.dtype(name) for name in files} == {torch.bfloat16}
    assert json.loads((tmp_path / "result" / "config.json").read_text())["dtype"] == "bfloat16"
    assert conversion.num_bytes == sum(tensor.nbytes for tensor in files.values())
    assert conversion.error < 0.02 * conversion.largest_logit


def test_tokens_and_tokenizer_come_along(tmp_path: Path) -> None:
    saved("qwen3_5", tmp_path / "source", {"eos_token_id": 5, "pad_token_id": 6})
    (tmp_path / "source" / "tokenizer.json").write_text("{}")
    convert(tmp_path / "source", tmp_path / "result", "qwen3_next")
    assert (tmp_path / "result" / "tokenizer.json").read_text() == "{}"
    config = json.loads((tmp_path / "result" / "config.json").read_text())
    assert (config["eos_token_id"], config["pad_token_id"]) == (5, 6)


def test_our_hugging_face_form_loads_after_registering(tmp_path: Path) -> None:
    gatelab.interop.register()
    convert(GOLDEN / "headwise", tmp_path / "result", "gatelab")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "result").eval()
    with torch.no_grad():
        expected = load(GOLDEN / "headwise")(token_ids())
        torch.testing.assert_close(theirs(token_ids()).logits, expected, rtol=1e-5, atol=1e-5)


def test_a_result_that_computes_something_else_is_not_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gatelab.interop.targets._shifted", lambda shift, weight: weight)
    source = checkpoint(tmp_path / "source", gates=(GateSpec(),))
    with pytest.raises(ValueError, match=r"converted to qwen3_next computes something else: .*; nothing was written"):
        convert(source, tmp_path / "result", "qwen3_next")
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


def test_where_nothing_can_be_written(tmp_path: Path) -> None:
    (tmp_path / "result").mkdir()
    with pytest.raises(ValueError, match="result exists already; choose a new folder"):
        convert(GOLDEN / "headwise", tmp_path / "result", "official")
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match="file is a file where a folder is needed"):
        convert(GOLDEN / "headwise", tmp_path / "file" / "result", "official")
    with pytest.raises(ValueError, match="max_shard_bytes=0 is not a size"):
        convert(GOLDEN / "headwise", tmp_path / "new", "official", max_shard_bytes=0)


@pytest.mark.parametrize("tied", [True, False])
@torch.no_grad()
def test_streamed_logits_are_those_of_the_whole_model(tied: bool, tmp_path: Path) -> None:
    mixture = EXPERTS.model_copy(update={"router": "sigmoid", "selection_bias": True})
    source = checkpoint(tmp_path / "source", gates=(GateSpec(),), mixture=mixture, tied_head=tied)
    opened = open_checkpoint(source)
    streamed = streamed_logits(opened.settings, opened.tensors, token_ids())
    torch.testing.assert_close(streamed, load(source)(token_ids()), rtol=1e-5, atol=1e-5)


class Watched(dict[str, Tensor]):
    """Notes which names were read."""

    def __init__(self, tensors: Checkpoint):
        super().__init__(tensors.tensors.items())
        self.read: list[str] = []

    def __getitem__(self, name: str) -> Tensor:
        self.read.append(name)
        return super().__getitem__(name)


def test_streaming_reads_each_tensor_once_in_its_turn(tmp_path: Path) -> None:
    opened = open_checkpoint(checkpoint(tmp_path / "source", tied_head=False))
    watched = Watched(opened)
    streamed_logits(opened.settings, watched, token_ids())
    assert sorted(watched.read) == sorted(opened.tensors)
    assert [name for name in watched.read if ".layers.0." in name] == watched.read[1:12]


def test_metadata_of_a_conversion(tmp_path: Path) -> None:
    convert(GOLDEN / "elementwise", tmp_path / "result", "qwen3_next")
    with safe_open(tmp_path / "result" / "model.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt", "gate_layout": "L2"}
